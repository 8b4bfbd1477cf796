"""Generalised D-retrieval: how the error falls where the number of heads h reaches the number D of things to look for.

Run: leansurgeon run d-retrieval && python examples/d_retrieval.py runs/d-retrieval      the whole table, minutes
     python examples/d_retrieval.py                                         D = 2 with one and two heads, 8 tokens

The error of a cell is the smallest over the seeds, as in the theory's own experiment; a plot is written beside it.
"""

import json
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

from leansurgeon import experiment
from leansurgeon.training.recipe.reading import load


def short() -> list[dict]:
    """Two arms of the recipe, 600 steps, one seed."""
    recipe = load("d-retrieval", ["train.duration=600st", "seeds=[0]", "task.length=8"])
    recipe = recipe.model_copy(update={"arms": {name: recipe.arms[name] for name in ("D2-h1", "D2-h2")}})
    return [summary.as_dict() for summary in experiment.run(recipe, Path(tempfile.mkdtemp()))]


def table(summaries: list[dict]) -> dict[int, dict[str, float]]:
    """D -> arm -> smallest NMSE over the seeds."""
    found: dict[int, dict[str, float]] = {}
    for summary in summaries:
        arms = found.setdefault(summary["recipe"]["task"]["dimension"], {})
        name, error = summary["experiment"]["arm"].split("-")[1], summary["final"]["metric"]
        arms[name] = min(error, arms.get(name, error))
    order = ["h1", "h2", "h3", "h4", "h5", "h6", "control"]
    return {d: {name: found[d][name] for name in order if name in found[d]} for d in sorted(found)}


def plot(found: dict[int, dict[str, float]], path: Path) -> None:
    import altair

    rows = [
        {"heads": int(name[1:]), "error": error, "D": dimension}
        for dimension, arms in found.items()
        for name, error in arms.items()
        if name != "control"
    ]
    up = altair.Y("error:Q", title="NMSE, smallest over seeds", scale=altair.Scale(type="log"))
    lines = altair.Chart(altair.Data(values=rows)).mark_line(point=True)
    lines.encode(x=altair.X("heads:O", title="heads h"), y=up, color="D:N").save(str(path))


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    runs = [json.loads(p.read_text()) for p in folder.glob("*/summary.json")] if folder else short()
    errors = table(runs)
    print(tabulate([{"D": d, **errors[d]} for d in sorted(errors, reverse=True)], headers="keys", floatfmt=".4f"))
    plot(errors, Path("d_retrieval.png"))
