"""What this package is and where it lies. Rooms ask here: `leansurgeon` itself stands on top of all of them."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parent
