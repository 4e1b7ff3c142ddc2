"""``python -m torchtpu.cli``: the same as the console script."""

import sys

from torchtpu_cli import main

sys.exit(main())
