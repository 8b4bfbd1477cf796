"""Several sources of sample data as one: evenly shared, in turns, and the proof of a cut by source."""

from __future__ import annotations

import json

import pytest
import torch

from leansurgeon.measure.data import mixed, own
from leansurgeon.measure.data.calibration import Calibration, Parts
from tests.conftest import build
from tests.support.command_line import leansurgeon
from tests.support.models.word_models import WORDS, words


def data(name: str, rows: int, value: int, width: int = 16, **more) -> Calibration:
    """Batches of two rows that hold `value` everywhere."""
    batches = [{"input_ids": torch.full((min(2, rows - i), width), value)} for i in range(0, rows, 2)]
    return Calibration(name, name, name, batches, batches[:2], batches[:1], **more)


def values(batches) -> list[int]:
    return [int(b["input_ids"][0, 0]) for b in batches]


@pytest.mark.parametrize(
    ("rows", "total", "wanted"),
    [([100, 1000, 1000], 1000, [100, 450, 450]), ([5, 5], 20, [5, 5]), ([9, 9, 9], 10, [3, 3, 4]), ([7], 3, [3])],
)
def test_every_source_gives_the_same_as_far_as_it_can(rows, total, wanted):
    assert mixed.evenly_filled(rows, total) == wanted


def test_sources_take_turns_and_few_samples_are_all_taken():
    found = mixed.mix_sources([data("a", 8, 1), data("b", 4, 2)])
    assert values(found.fit) == [1, 2, 1, 2, 1, 1] and values(found.guard) == [1, 2, 1, 2]
    assert found.name == "a + b" and [s.name for s in found.sources] == ["a", "b"]
    assert [s.name for s in found.as_record().sources] == ["a", "b"]
    assert found.digest != mixed.mix_sources([data("a", 8, 1), data("c", 4, 2)]).digest


def test_many_samples_are_as_many_as_usual(monkeypatch):
    monkeypatch.setattr(mixed, "TOKENS", Parts(fit=160, guard=64, heldout=64))
    for asked, counts in ((None, (5, 5)), (20, (14, 6))):  # ten windows of 16 tokens are usual
        found = mixed.mix_sources([data("a", 40, 1, asked=asked), data("b", 6, 2, asked=asked)])
        rows = torch.cat([b["input_ids"][:, 0] for b in found.fit]).tolist()
        assert (rows.count(1), rows.count(2)) == counts


def test_what_is_thin():
    assert mixed.is_thin(data("a", 8, 1)) and not mixed.is_thin(data("a", 8, 1, asked=8))
    assert not mixed.is_thin(data("a", 8, 1, width=4096))
    label = {"labels": torch.zeros(600)}
    for rows, more, thin in ((600, {}, True), (4_200, {}, False), (600, label, False), (400, label, True)):
        assert mixed.is_thin(lines("a", rows, width=16, **more), prose=True) is thin
        assert mixed.is_thin(lines("a", rows, width=16, **more)) is (rows < 512)
    assert not mixed.is_thin(lines("a", 450, width=1_200), prose=True)  # so many are usual of long ones


def test_own_samples_take_the_places_that_are_left():
    yours, own = lines("yours", 3_000, 1), lines("own", 2_000, 2)
    found = mixed.mix_sources([yours, mixed.fill_up(yours, own)])
    rows = torch.cat([b["input_ids"][:, 0] for b in found.fit]).tolist()
    assert (rows.count(1), rows.count(2)) == (3_000, 1_096)
    few = mixed.fill_up(lines("few", 100, 1), own)
    assert len(few.fit[0]["input_ids"]) == 2_000 and few.says == "own: 2000 to fit, 412 to guard, 412 to judge"


@pytest.fixture
def gpt(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    for i, first in enumerate((0, 25)):
        lines = (" ".join(WORDS[first + (k * k + j * j) % 25] for j in range(9)) for k in range(160))
        (tmp_path / f"{i}.txt").write_text("\n".join(lines))
    folder = tmp_path / "gpt2"
    build("gpt2").save_pretrained(folder)
    words(folder)
    return tmp_path


def test_the_proof_says_how_every_source_fares(gpt):
    both = ["--calibrate", gpt / "0.txt", "--calibrate", gpt / "1.txt"]
    done = leansurgeon("shrink", gpt / "gpt2", "--layers", "3", "--samples", "16", "-o", gpt / "out", *both)
    assert done.returncode == 0, done.stderr
    record = json.loads((gpt / "out" / "surgery.json").read_text())
    names = [s["name"] for s in record["decided"]["calibration"]["sources"]]
    assert list(record["judged"]) == names == ["0.txt", "1.txt"]
    losses = {found["loss"]["result"] for found in record["judged"].values()}
    assert len(losses) == 2 and "which had no part" not in done.stdout
    assert leansurgeon("shrink", gpt / "gpt2", "--layers", "3", *both[:2], *both[:2]).returncode == 2


def test_few_texts_are_mixed_with_the_models_own(gpt, monkeypatch):
    monkeypatch.setattr(own, "WINDOWS", Parts(8, 4, 4))
    wish = ["--layers", "3", "--calibrate", gpt / "0.txt", "--no-proof", "-o", gpt / "out"]
    done = leansurgeon("shrink", gpt / "gpt2", *wish)
    assert done.returncode == 0, done.stderr
    used = json.loads((gpt / "out" / "surgery.json").read_text())["decided"]["calibration"]
    assert [s["name"] for s in used["sources"]] == ["0.txt", "own"]
    assert used["samples"]["fit"] == sum(s["samples"]["fit"] for s in used["sources"])


def lines(name: str, rows: int, value: int = 1, width: int = 4, **more) -> Calibration:
    """As many lines of one length, in every part."""
    ids = torch.full((rows, width), value)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | more
    return Calibration(name, f"{name}: many", name, [batch], [batch], [batch])
