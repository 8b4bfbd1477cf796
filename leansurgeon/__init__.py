"""leansurgeon: more attention heads, fewer layers, and an honest account of what that gained.

    import leansurgeon

    lean = leansurgeon.shrink(model, heads="2x", layers=24, data=texts)     # a model gives a model
    cut = leansurgeon.shrink("my-model", layers=24, data="texts/")          # a path gives a folder, with its proof
    healed = leansurgeon.heal(cut, data="texts/", time="20m")

The words are those of the command line; errors are those of `leansurgeon.errors`. Importing the package costs nothing:
torch, transformers and timm are imported by the functions that need them.
"""

# Two functions have the names of rooms. Python sets a package's attribute when a room is loaded for the first time;
# loading these two here, which is a docstring each, leaves the names to the functions below for good.
# Whoever wants the rooms says `from leansurgeon.search import ...`.
import leansurgeon.report
import leansurgeon.search  # noqa: F401
from leansurgeon import errors
from leansurgeon.api.cutting import plan, shrink
from leansurgeon.api.looking import heads, kappa, load, search
from leansurgeon.api.training import heal, retrain
from leansurgeon.commands import diff as _diff
from leansurgeon.commands import report as _report
from leansurgeon.commands.command import function_of
from leansurgeon.version import __version__

diff = function_of(_diff.COMMAND)
report = function_of(_report.COMMAND)

__all__ = [
    "__version__",
    "diff",
    "errors",
    "heads",
    "heal",
    "kappa",
    "load",
    "plan",
    "report",
    "retrain",
    "search",
    "shrink",
]
