"""Every row of the paper against counts that were made by instantiating and counting the upstream code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leansurgeon.checkpoints.blockwise.skeleton import build_on_meta
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.errors import UsageError
from leansurgeon.paper import EXHIBITS, TABLES
from leansurgeon.paper.audit import OriginalModel, audit, audit_row, count, source_of, target_of

# Counted on the original code: cramming, Tiny-Stories-GPT, the LRA code of the Nystromformer, and timm with its
# attention classes rebuilt where the paper keeps head_dim.
UPSTREAM = {
    ("1", "Crammed BERT"): (119_589_889, 84_182_017),
    ("2", "GPT-2"): (89_160_785, 64_150_609),
    ("3", "ListOps"): (209_802, 192_906),
    ("3", "Text"): (370_562, 353_666),
    ("3", "Retrieval"): (395_138, 394_818),
    ("3", "Image"): (174_986, 191_242),
    ("3", "Pathfinder"): (173_954, 190_210),
    ("4", "ViT-B"): (86_567_656, 40_112_872),
    ("4", "DeiT-B"): (86_567_656, 40_112_872),
    ("4", "XCiT-M"): (84_395_752, 59_002_600),
    ("4", "TNT-B"): (65_428_680, 30_897_800),
    ("4", "VOLO-d3"): (86_325_072, 47_454_032),
    ("4", "DaViT-B"): (87_954_408, 62_653_416),
    ("5", "ViT-L"): (203_614_184, 98_597_864),
    ("5", "DeiT-L"): (203_614_184, 98_597_864),
    ("5", "XCiT-L"): (189_096_136, 103_792_744),
    ("5", "VOLO-d4"): (192_961_520, 105_556_976),
    ("5", "DaViT-L"): (196_811_752, 139_985_896),
}
# The same for the shape exactly as it is printed, where that is another one.
AS_PRINTED = {
    ("3", "Retrieval", "lean"): 378_242,
    ("3", "Image", "lean"): 158_090,
    ("3", "Pathfinder", "lean"): 157_058,
    ("4", "TNT-B", "lean"): 44.02,
    ("4", "VOLO-d3", "original"): 103_119_696,
    ("5", "ViT-L", "original"): 304_326_632,
    ("5", "DeiT-L", "original"): 304_326_632,
    ("5", "VOLO-d4", "original"): 230_736_368,
    ("5", "VOLO-d4", "lean"): 85.49,
}
# Of the lean rows: (policy, the original's MLP) -> parameters, in millions where only that was noted.
WHAT_IF = {
    ("1", "Crammed BERT"): {("keep", False): 107_774_977},
    ("2", "GPT-2"): {("keep", False): 65_461_329},
    ("3", "ListOps"): {("split", False): 176_330},
    ("4", "ViT-B"): {("split", False): 34_602_472},
    ("4", "XCiT-M"): {("split", False): 46_401_256},
    ("4", "TNT-B"): {("keep", False): 38.76, ("split", True): 44.02, ("keep", True): 51.88},
    ("4", "DaViT-B"): {("keep", False): 73.15},
    ("5", "XCiT-L"): {("keep", False): 117.96},
    ("5", "DaViT-L"): {("keep", False): 163.60},
}
PRINTED_CHANGES = {"Crammed BERT": -29.6, "GPT-2": -28.05, "ListOps": -8.05, "Text": -4.56, "Image": 9.29}


def pair(key: str, model: str) -> list:
    """Both rows of a model."""
    exhibit = EXHIBITS[key]
    rows = [row for row in exhibit.rows if row.model == model]
    return [audit_row(row, exhibit.original(row)) for row in rows]


def same(count: int, known: float) -> bool:
    """An integer exactly, millions to the hundredth."""
    return count == known if isinstance(known, int) else round(count / 1e6, 2) == known


def test_every_table_row_has_its_upstream_count():
    rows = [(e.key, row.model, row.role) for e in TABLES for row in e.rows]
    assert sorted(rows) == sorted((k, m, role) for k, m in UPSTREAM for role in ("original", "lean"))
    assert len(rows) == 36


@pytest.mark.parametrize(("key", "model"), UPSTREAM, ids=lambda x: str(x))
def test_rows_are_the_upstream_integers(key, model):
    """And the parts of the saving add up to the difference."""
    original, lean = pair(key, model)
    assert (original.parameters, lean.parameters) == UPSTREAM[key, model]
    assert original.change_percent == 0 and sum(lean.saved_by.values()) == original.parameters - lean.parameters


@pytest.mark.parametrize(("key", "model", "role"), AS_PRINTED, ids=lambda x: str(x))
def test_the_printed_shape_gives_another_count(key, model, role):
    (a,) = (a for a in pair(key, model) if a.row.role == role)
    assert same(a.as_printed, AS_PRINTED[key, model, role])
    assert f"{a.as_printed:,}" in a.remark


def test_no_other_row_is_read_differently_from_print():
    reread = {(e.key, row.model, row.role) for e in TABLES for row in e.rows if row.reading}
    assert reread == set(AS_PRINTED)


def count_as(key: str, model: str, policy: str, original_mlp: bool) -> int:
    """The lean row's parameters by another head policy, with its own MLP or that of the original."""
    row, start = pair(key, model)[1].row, OriginalModel(pair(key, model)[1].row.preset)
    words = replace(row.words, mlp_dim=None) if original_mlp else row.words
    return count(start, target_of(start, words, policy))


@pytest.mark.parametrize(("key", "model"), WHAT_IF, ids=lambda x: str(x))
def test_other_policies_give_other_counts(key, model):
    for choice, known in WHAT_IF[key, model].items():
        assert same(count_as(key, model, *choice), known), choice


def test_a_policy_that_is_impossible_says_why():
    with pytest.raises(UsageError, match=r"\b1024\b.*\b30\b"):
        count_as("5", "ViT-L", "split", False)


def test_what_fits_the_printed_figures():
    """30 of 36 do. Six do not: LRA Text twice and DaViT-B for no known reason, three since the row below was copied."""
    found = {(e.key, a.row.model, a.row.role): a for e in TABLES for a in audit(e)}
    misses = {name for name, a in found.items() if a.agreement == "differs"}
    known = {
        ("3", "Text", "original"): (-638, -0.17),
        ("3", "Text", "lean"): (-334, -0.09),
        ("3", "Retrieval", "original"): (338, 0.09),
        ("3", "Image", "original"): (-16_214, -8.48),
        ("3", "Pathfinder", "original"): (-16_246, -8.54),
        ("4", "DaViT-B", "lean"): (653_416, 1.05),
    }
    assert misses == set(known) and len(found) == 36
    for name in misses:
        assert (found[name].difference, round(found[name].difference_percent, 2)) == known[name]
        assert found[name].remark
    assert [name for name, a in found.items() if a.agreement == "truncates"] == [("1", "Crammed BERT", "original")]


def test_printed_changes():
    for key, model in UPSTREAM:
        lean = pair(key, model)[1]
        if model in PRINTED_CHANGES:
            assert lean.change_percent == pytest.approx(PRINTED_CHANGES[model], abs=0.01)


def vit(layers: int, heads: int, mlp_dim: int) -> int:
    """ViT of width 768 with head_dim 64, 224 pixels, patches of 16, 1000 classes."""
    d, inner = 768, 64 * heads
    block = 3 * inner * (d + 1) + d * (inner + 1) + mlp_dim * (d + 1) + d * (mlp_dim + 1) + 4 * d
    return layers * block + d * (3 * 16 * 16 + 1) + d * (1 + 197) + 2 * d + 1000 * (d + 1)


def lra(layers: int, heads: int, vocab: int, positions: int, classes: int) -> int:
    """LRA model of width 64 with head_dim 32, MLP and classifier of 128, two token types."""
    d, inner, m = 64, 32 * heads, 128
    block = 3 * inner * (d + 1) + d * (inner + 1) + m * (d + 1) + d * (m + 1) + 4 * d
    return layers * block + d * (vocab + positions) + 2 * d + m * (d + 1) + classes * (m + 1)


@pytest.mark.parametrize("key", ["fig3", "fig4", "fig8", "fig9"])
def test_figures_against_closed_forms(key):
    for a in audit(EXHIBITS[key]):
        words = a.row.words
        layers, heads = int(words.layers), int(words.heads)
        if key in ("fig3", "fig4"):
            assert a.parameters == vit(layers, heads, int(words.mlp_dim))
        else:
            assert a.parameters == lra(layers, heads, *((32, 2048, 10) if key == "fig8" else (512, 4096, 2)))


def test_figure_3_in_millions():
    found = {(a.row.words.layers, a.row.words.heads): a for a in audit(EXHIBITS["fig3"])}
    counted = [round(found["12", str(h)].parameters / 1e6, 1) for h in range(2, 20, 2)]
    assert counted == [63.0, 67.7, 72.4, 77.1, 81.8, 86.6, 91.3, 96.0, 100.7]
    assert found["8", "14"].difference_percent == pytest.approx(0.27, abs=0.01)
    assert found["8", "18"].difference_percent == pytest.approx(0.39, abs=0.01)


ROWS = [(key, i) for key, exhibit in EXHIBITS.items() for i in range(len(exhibit.rows))]


@pytest.mark.parametrize(("key", "index"), ROWS, ids=lambda x: str(x))
def test_the_declaration_counts_what_the_library_builds(key, index, monkeypatch):
    """Also the printed shape and the alternatives."""
    exhibit = EXHIBITS[key]
    row = exhibit.rows[index]
    declared = audit_row(row, exhibit.original(row))

    def built(start, target):
        config = Reshaped(source_of(start), target.architecture, target.shape).config()
        return sum(p.numel() for p in build_on_meta(config, target.architecture).parameters())

    monkeypatch.setattr("leansurgeon.paper.audit.count", built)
    assert audit_row(row, exhibit.original(row)) == declared
