"""Checkpoints: open a SOURCE, read tensors lazily, write folders that are whole or absent, and prove them by
reloading.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leansurgeon.checkpoints.model import load
    from leansurgeon.checkpoints.source import open_source

__all__ = ["load", "open_source"]


def __getattr__(name: str) -> Any:
    # `load` needs torch and `open_source` does not; neither is imported before it is used.
    home = {"load": "model", "open_source": "source"}.get(name)
    if home is None:
        raise AttributeError(name)
    return getattr(import_module(f"leansurgeon.checkpoints.{home}"), name)
