"""The map of head importance and the pruning curve as pictures. matplotlib is an extra and imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leansurgeon.report.heads import LABELS, name, unit

STYLES = {"importance": "-", "even": "-", "oracle": "--", "random": ":", "reverse": "-."}


def write(document: dict[str, Any], folder: Path) -> list[Path]:
    """Pictures into `folder`, which `report.plots.check` has made; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    files = [importance_map(document, folder / "heads-importance.png")]
    if "curve" in document:
        files.append(curve(document, folder / "heads-pruning.png"))
    return files


def importance_map(document: dict[str, Any], file: Path) -> Path:
    """A row a layer, a cell a head, as a share of all heads' importance."""
    import numpy as np
    from matplotlib import pyplot

    entries = document["attentions"]
    total = sum(sum(entry["importance"]) for entry in entries) or 1.0
    grid = np.full((len(entries), max(entry["heads"] for entry in entries)), np.nan)
    for row, entry in zip(grid, entries, strict=True):
        row[: entry["heads"]] = 100 * np.array(entry["importance"]) / total
    figure, axes = pyplot.subplots(figsize=(2.5 + 0.35 * grid.shape[1], 1.5 + 0.3 * len(grid)), layout="constrained")
    image = axes.imshow(grid, cmap="cividis", aspect="auto")
    axes.set_yticks(range(len(entries)), [name(entry, document) for entry in entries])
    axes.set_xticks(range(0, grid.shape[1], max(1, grid.shape[1] // 12)))
    axes.set_xticklabels([str(int(tick) + 1) for tick in axes.get_xticks()])
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    figure.colorbar(image, label="importance, % of all heads' sum")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return file


def curve(document: dict[str, Any], file: Path) -> Path:
    """The score by the share of heads that is off, a line an order, a band for random orders."""
    from matplotlib import pyplot

    key = "accuracy" if "accuracy" in document["whole"] else "loss"
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for order, points in document["curve"]["orders"].items():
        x = [100 * point["fraction"] for point in points]
        (line,) = axes.plot(x, [p[key] for p in points], STYLES.get(order, "-"), marker=".", label=LABELS[order])
        if f"{key}_low" in points[0]:
            low, high = ([p[key + end] for p in points] for end in ("_low", "_high"))
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15)
    axes.set_xlabel("heads off, %")
    axes.set_ylabel("accuracy" if key == "accuracy" else "loss" if document["text"] else unit(document))
    axes.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return file
