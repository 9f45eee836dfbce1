"""`python -m sparkctl`."""

import sys

from sparkctl.main import main

sys.exit(main())
