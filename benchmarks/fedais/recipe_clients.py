"""Where `silograph reproduce fedais/clients` finds its recipe: see `fedais_by_clients`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fedais_by_clients import RECIPE as RECIPE
