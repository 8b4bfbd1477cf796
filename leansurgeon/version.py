"""The version and the folder of this package, for modules that must not import `leansurgeon` itself."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parent
