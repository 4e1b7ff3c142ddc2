"""``python -m torchtpu.cli``: the same as the console script."""

import sys

from torchtpu.cli import main

sys.exit(main())
