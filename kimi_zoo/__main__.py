"""`python -m kimi_zoo` is the command `kimi-zoo`."""

import sys

from kimi_zoo.cli import main

sys.exit(main())
