"""Calibrated cuts of models with an encoder and a decoder: both stacks lose layers, and both are healed."""

import json
import shutil

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.commands.samples import sample_data_of_all
from leansurgeon.errors import UsageError
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.support.command_line import leansurgeon
from tests.support.methods import with_method
from tests.support.models.word_models import WORDS, words
from tests.surgery.cuts import cut_with_data, error

KEPT = (0, 1, 3, 4, 5, 7)  # of four and four


FAMILIES = ["bart", pytest.param("t5", marks=pytest.mark.families)]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_stacks_are_healed_in_closed_form_and_then_locally(family, trained, tmp_path):
    folder, data = trained(family)
    errors = []
    for heal in ("none", "closed", "local"):
        out, outcome = cut_with_data(tmp_path, (folder, data), {"layers": "3"}, heal, keep=KEPT, heal=heal)
        errors.append(error(out, folder, data))
    assert errors[1] < 0.7 * errors[0] and errors[2] < errors[1]
    found = outcome.record.healing.local
    assert found.kept and found.after < 0.95 * found.before
    assert [cut.first for cut in found.cuts] == [1, 4]  # a span each, which stays in its stack
    assert [[span.until for span in cut.spans] for cut in found.cuts] == [[2], [5]]
    assert outcome.record.healing.score.guard_loss is not None  # the answers are scored


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_chosen_in_both_stacks(family, trained):
    folder, data = trained(family)
    outcome = calibrate(with_method(plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True)), data)
    outcome.close()
    tried = outcome.record.candidates
    assert [sum(i // 4 == stack for i in outcome.record.layers) for stack in (0, 1)] == [3, 3]
    assert all(c.score.judged_by == c.score.guard_divergence for c in tried)
    gone = [set(range(8)) - set(c.kept) for c in tried if c.data == "part"]
    assert set().union(*gone) == {1, 2, 3, 5, 6, 7}  # every start behind the first layers


def test_the_command_cuts_and_proves_on_pairs(trained, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(trained("bart")[0], folder)
    words(folder)
    lines = (f"{' '.join(WORDS[(k + j) % 25] for j in range(7))}\t{WORDS[k % 25]} {WORDS[k % 7]}" for k in range(60))
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    asked = ("--keep", "0,1,3,4,5,7", "--calibrate", tmp_path / "a.tsv", "--samples", "16", "--heal", "closed")
    done = leansurgeon("shrink", folder, *asked, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "surgery.json").read_text())
    assert record["decided"]["calibration"]["name"] == "pairs" and record["decided"]["healing"]
    assert record["proof"]["compared"]["loss"]["result"] > 0


def test_data_that_is_named_becomes_pairs(trained, tmp_path):
    (tmp_path / "a.txt").write_text("no tokenizer")
    source = open_source(str(trained("bart")[0]))
    for name, says in ((str(tmp_path / "a.txt"), None), ("task:digits", "--calibrate task:digits")):
        with pytest.raises(UsageError, match=says):
            sample_data_of_all(source, [name], None, None, 0, print)
