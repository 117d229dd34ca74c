"""`python -m mtplab.cli`."""

import sys

from mtplab.cli import main

sys.exit(main())
