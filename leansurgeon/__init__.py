"""leansurgeon: more attention heads, fewer layers, and an honest account of what that gained.

    import leansurgeon

    lean = leansurgeon.shrink(model, heads="2x", layers=24, data=texts)     # a model gives a model
    cut = leansurgeon.shrink("my-model", layers=24, data="texts/")          # a path gives a folder, with its proof
    healed = leansurgeon.heal(cut, data="texts/", time="20m")

Arguments have the names of the command line's options; errors are those of `leansurgeon.errors`. Importing the package
is fast: torch, transformers and timm are imported by the functions that need them.
"""

from typing import Any

# Two functions have the names of subpackages. Python sets a package's attribute when a subpackage is first imported;
# importing these two here, which are only a docstring each, leaves the names to the functions below for good. To use
# the subpackages, write `from leansurgeon.search import ...`.
import leansurgeon.report
import leansurgeon.search  # noqa: F401
from leansurgeon import errors
from leansurgeon.commands.command import LazyFunction
from leansurgeon.version import __version__

diff = LazyFunction("diff")
heads = LazyFunction("heads")
kappa = LazyFunction("kappa")
load = LazyFunction("load")
plan = LazyFunction("plan")
report = LazyFunction("report")
retrain = LazyFunction("retrain")
run = LazyFunction("run")
search = LazyFunction("search")
shrink = LazyFunction("shrink")


def compare(*models: Any, data: Any = None, tokenizer: Any = None, **options: Any) -> Any:
    """Compare models on the same held-out samples of `data`: quality, parameters, size, memory, latency, kappa.

    The first one is the original. Takes folders, results, and models in memory (with their `tokenizer` if they read
    text). `options` are those of `report`, whose result it returns.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> how = {"proof": False, "progress": False}
    >>> source = leansurgeon.shrink("digits-vit", init="fresh", out=f"{folder}/source", **how)
    >>> cut = leansurgeon.shrink(source, layers=2, uncalibrated=True, out=f"{folder}/lean", **how)
    >>> "lean" in str(leansurgeon.compare(source, cut, data="task:digits", progress=False))
    True
    """
    from contextlib import ExitStack
    from pathlib import Path

    from leansurgeon.commands import in_memory

    with ExitStack() as held:
        folders = []
        for model in models:
            copy = in_memory.write_copy(model, tokenizer) if in_memory.is_model(model) else None
            held.callback(copy.close if copy else str)
            folders.append(copy.folder if copy else Path(in_memory.place(model, "models")))
        return report(folders, measure=True, data=data, **options)


def heal(model: Any, data: Any, **options: Any) -> Any:
    """Retrain a model on the user's own data; takes and returns what `retrain` does.

    The model learns from the one that it was cut from, if that is available. Weights that training did not improve are
    kept as they were.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> leansurgeon.heal(cut, ["some text"], progress=False)
    Traceback (most recent call last):
    leansurgeon.errors.UsageError: lean takes images, and ...
    """
    return retrain(model, data=data, **options)


__all__ = [
    "__version__",
    "compare",
    "diff",
    "errors",
    "heads",
    "heal",
    "kappa",
    "load",
    "plan",
    "report",
    "retrain",
    "run",
    "search",
    "shrink",
]
