"""What the audit says: how a count fits a printed figure, the data as the paper prints it, tables of 80 columns."""

from __future__ import annotations

import re

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.paper import EXHIBITS, TABLES, choose_exhibits
from leansurgeon.paper.audit import agreement, audit
from leansurgeon.paper.output import document, render


@pytest.mark.parametrize(
    ("count", "text", "fits"),
    [
        (86_567_656, "86.6 M", "rounds"),
        (86_325_072, "86 M", "rounds"),
        (119_589_889, "119 M", "truncates"),
        (62_653_416, "62.0 M", "differs"),
        (192_906, "192.9 k", "rounds"),
        (370_562, "371.2 k", "differs"),
        (2_500_000, "3 M", "rounds"),  # half up, as people round
        (1, None, "unprinted"),
    ],
)
def test_agreement(count, text, fits):
    assert agreement(count, text) == fits


def test_the_glue_average_of_table_1_is_that_of_its_tasks():
    for row in EXHIBITS["1"].rows:
        *tasks, average = row.scores.values()
        assert round(sum(tasks) / len(tasks), 1) == average


def test_printed_memory_of_the_vision_tables_is_a_multiple_of_eight_gpus():
    odd = {
        (row.model, row.role)
        for key in "45"
        for row in EXHIBITS[key].rows
        if round(row.memory * 10) % 8  # 8 GPUs, each read to 0.1 GB
    }
    assert odd == {("VOLO-d3", "original")}


@pytest.mark.parametrize("key", EXHIBITS)
def test_tables_have_80_columns(key):
    text = render([(EXHIBITS[key], audit(EXHIBITS[key]))])
    assert text.startswith(EXHIBITS[key].name)
    assert max(map(len, text.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert "{" not in text


def test_contradictions_are_said():
    text = " ".join(render([(e, audit(e)) for e in TABLES]).split())
    for words in (
        r"ViT-L original and DeiT-L original: 24 layers\b.{,30}\b16 heads\b.{,30}\b4096\b.{,9}\b304,326,632\b",
        r"\(203,614,184\).{,9}\b16 layers \(203,556,840\)",
        r"-9 %.{,9}-8\.05 %",
        r"\b1 layer\b.{,20}\b4 heads\b.{,9}\b378,242 parameters;.{,40}\b6 heads\b",
        r"\b1 layer\b.{,20}\b4 heads\b.{,9}\b157,058 parameters;.{,40}\b8 heads\b",
        r"\bpaper cuts\b",
        r"TNT-B lean: .{,30}\b2560\b.{,20}\b44,015,240 parameters",
        r"VOLO-d3 original: .{,20}\(1024, 2048, \.\.\.\).{,20}\b103,119,696 parameters",
        r"DaViT-B lean: .{,30}\b62\.0 M\b.{,30}\b62,653,416\b",
        r"\bReached: 30 of 36\b",
        r"\bpaper\'s own\b.{,30}: GLUE and memory\b",
        r"\bNot reached: Text original -0\.17 %, Text lean -0\.09 %",
    ):
        assert re.search(words, text), words


def test_figure_8_contradicts_its_caption():
    text = " ".join(render([(EXHIBITS["fig8"], audit(EXHIBITS["fig8"]))]).split())
    assert re.search(r"\b8 heads\b.*\b226,058\b.*\+7\.75 %", text, re.S)


def test_document_keeps_the_papers_numbers_apart():
    exhibit = EXHIBITS["4"]
    (entry,) = document([(exhibit, audit(exhibit))])["exhibits"]
    lean = entry["rows"][1]
    assert lean["printed"]["scores"] == {"top-1": 80.4, "top-5": 94.9} and lean["printed"]["memory_gb"] == 101.6
    assert lean["printed"]["mlp_dim"] == "1536" and lean["parameters"] == 40_112_872
    assert lean["saved_by"] == {"depth": 35_439_360, "heads": -5_510_400, "mlp": 16_525_824}


def test_choosing_an_exhibit():
    assert choose_exhibits(None) == TABLES
    assert [choose_exhibits(word)[0].key for word in ("4", "table 4", "Fig3", "figure-8")] == ["4", "4", "fig3", "fig8"]
    assert len(choose_exhibits("all")) == 10
    for word, near in (("6", "1, 2, 3"), ("fig33", "did you mean 'fig3'")):
        with pytest.raises(UsageError, match="no '") as error:
            choose_exhibits(word)
        assert near in str(error.value)
