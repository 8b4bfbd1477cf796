"""Where the shipped recipes are. Names and paths only, so that a shell can complete them at once."""

from __future__ import annotations

from pathlib import Path

from leansurgeon.version import PACKAGE

SCHEMA = "recipe.schema.json"  # beside the recipes, for editors; `leansurgeon recipes schema` prints it


def list_shipped() -> dict[str, Path]:
    """Return name -> file of the shipped recipes (in the wheel, or beside the package in a checkout)."""
    return _in_folder(".")


def bases() -> dict[str, Path]:
    """Return name -> file of the bases that shipped recipes share; these are not recipes themselves."""
    return _in_folder("bases")


def folder() -> Path | None:
    """Return the folder of the shipped recipes; None if there is none."""
    package = PACKAGE.resolve()
    return next((place for place in (package / "recipes", package.parent / "recipes") if place.is_dir()), None)


def _in_folder(name: str) -> dict[str, Path]:
    home = folder()
    return {path.stem: path for path in sorted((home / name).glob("*.yaml"))} if home else {}
