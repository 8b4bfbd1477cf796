"""The picture of a model before and after: every head of every layer once, and lines that follow the record."""

from __future__ import annotations

from pathlib import Path

from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.report.charts import sections
from leansurgeon.report.charts.sections import GOES, NEW, STAYS
from leansurgeon.report.rows import Section, make_row
from leansurgeon.report.runs import Run, read_cut
from leansurgeon.shape import Shape, Stage


def record(before: Shape, after: Shape, layers: list[int]) -> SurgeryRecord:
    counts = {f"parameters_{when}": {"total": total} for when, total in (("before", 1000), ("after", 800))}
    plan = {"before": before.as_dict(), "after": after.as_dict(), "layers": layers, "operators": [], **counts}
    return SurgeryRecord.from_dict({"schema_version": 1, "source": {"name": "model"}, "plan": plan})


def shape(*stages: tuple[int, int]) -> Shape:
    return Shape(tuple(Stage(depth, heads, 8, heads, 64, 32) for depth, heads in stages))


def models(*cuts) -> Section:
    """A section of untrained models that were made so."""
    rows = tuple(make_row("lean", "lean", [Run(Path(str(i)), "model", 0.0, cut=cut)]) for i, cut in enumerate(cuts))
    return Section("models", "m", None, rows)


def marks(cut) -> tuple[list[dict], list[dict]]:
    """The rectangles of the drawing, and its lines."""
    layers = sections.draw_cut(cut).to_dict()["layer"]
    rows = [layer["data"]["values"] for layer in layers]
    return rows[1], rows[0]


def test_every_head_is_drawn_once_and_lines_lead_where_the_record_says():
    cut = read_cut(record(shape((4, 3)), shape((3, 5)), [0, 2, 3]))
    rects, lines = marks(cut)
    counts = {what: sum(r["what"] == what for r in rects) for what in (STAYS, GOES, NEW)}
    assert counts == {STAYS: 3 * 3 + 3 * 3, GOES: 3, NEW: 3 * 2}
    assert [int(line["x"]) for line in lines] == [0, 2, 3]
    assert [line["x2"] for line in lines] == [1.0, 2.0, 3.0]  # three layers stand in the middle below four
    assert len({(r["x"], r["y"]) for r in rects}) == len(rects)
    assert "layer 2, head 1: is cut out" in " ".join(r["says"] for r in rects)
    (chart,) = sections.of_cuts(models(cut))
    assert chart.key == "lean-cut" and "1,000" in chart.says
    assert chart.title == "lean: 4 to 3 layers, 3 to 5 heads"


def test_stages_have_their_own_heads_and_large_models_bars():
    cut = read_cut(record(shape((2, 2), (2, 4)), shape((1, 2), (2, 8)), [0, 2, 3]))
    rects, _ = marks(cut)
    assert sum(r["what"] == GOES for r in rects) == 2 and sum(r["what"] == NEW for r in rects) == 8
    large = read_cut(record(shape((80, 64)), shape((60, 64)), list(range(60))))
    rects, _ = marks(large)
    assert len(rects) == 80 + 60  # a bar for every layer
    tall = [r["y2"] - r["y"] for r in rects]
    assert max(tall) - min(tall) < 1e-9


def test_what_cannot_be_drawn_is_left_out():
    same = read_cut(record(shape((4, 3)), shape((4, 3)), [0, 1, 2, 3]))
    unknown = read_cut(record(shape((4, 3)), shape((3, 3)), []))
    beyond = read_cut(record(shape((4, 3)), shape((3, 3)), [0, 2, 9]))
    assert sections.of_cuts(models(same, unknown, beyond)) == []
    assert sections.of_cuts(Section("experiment", "e", None, ())) == []
