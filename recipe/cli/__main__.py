"""``python -m empo2.recipe.cli``."""

import sys

from . import main

sys.exit(main())
