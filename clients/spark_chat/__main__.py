"""`python -m spark_chat`."""

import sys

from spark_chat.main import main

sys.exit(main())
