"""Where `silograph reproduce fedais/table2` finds its recipe: see `fedais_table2`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fedais_table2 import RECIPE as RECIPE
