"""python -m spark_gateway"""

import sys

from spark_gateway.main import main

sys.exit(main())
