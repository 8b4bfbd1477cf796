"""Calibrated cuts of models with an encoder and a decoder: both stacks lose layers, and both are healed."""

import json

import pytest
import torch
from typer.testing import CliRunner

from leansurgeon.checkpoints.source import open_source
from leansurgeon.cli.main import app
from leansurgeon.commands.samples import sample_data_of_all
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.calibration import IGNORED, Calibration
from leansurgeon.measure.data.pairs import Seq2Seq, batch_of
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.conftest import build
from tests.support.methods import with_method
from tests.support.models.word_models import WORDS, words
from tests.surgery.test_calibrate import cut, error, text_batches

KEPT = (0, 1, 3, 4, 5, 7)  # of four and four


def pairs(count, seed):
    """A rule to go on with: the input has its beginning, the answer what follows; of several lengths."""
    found = []
    for i, batch in enumerate(text_batches(count, seed, "gpt2")):
        long = 8 + i % 3
        rows = [(ids[:long].tolist(), ids[long : 14 + k % 3].tolist()) for k, ids in enumerate(batch["input_ids"])]
        found.append(batch_of(rows, pad=0, start=0))
    return found


@pytest.fixture(scope="module", params=["t5", "bart"])
def trained(request, tmp_path_factory):
    model = build(request.param)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for batch in pairs(60, 1):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp(request.param)
    model.eval().save_pretrained(folder)
    parts = {name: pairs(n, seed) for name, n, seed in (("fit", 16, 2), ("guard", 6, 3), ("heldout", 6, 4))}
    return folder, Calibration("tiny", "tiny", "-", **parts, task=Seq2Seq())


def test_both_stacks_are_healed_in_closed_form_and_then_locally(trained, tmp_path):
    folder, data = trained
    wanted = {"layers": "3"}
    plain, _ = cut(tmp_path, trained, wanted, "plain", keep=KEPT, heal="none")
    closed, _ = cut(tmp_path, trained, wanted, "closed", keep=KEPT, heal="closed")
    local, outcome = cut(tmp_path, trained, wanted, "local", keep=KEPT, heal="local")
    errors = [wrong(out, folder, data) for out in (plain, closed, local)]
    assert errors[1] < 0.7 * errors[0] and errors[2] < errors[1]
    found = outcome.record.healing.local
    assert found.kept and found.after < 0.95 * found.before
    assert [cut.first for cut in found.cuts] == [1, 4]  # a span each, which stays in its stack
    assert [[span.until for span in cut.spans] for cut in found.cuts] == [[2], [5]]
    assert outcome.record.healing.score.guard_loss is not None  # the answers are scored


def wrong(out, folder, data):
    """Relative error of the logits, of rows without padding in the answer."""
    whole = [{k: v[(b["labels"] != IGNORED).all(1)] for k, v in b.items()} for b in data.heldout]
    return error(out, folder, Calibration("tiny", "tiny", "-", [], [], [unmasked(b) for b in whole]))


def unmasked(batch):
    """Inputs are as long as each other here."""
    assert batch["attention_mask"].all()
    return {k: v for k, v in batch.items() if k != "attention_mask"}


def test_layers_are_chosen_in_both_stacks(trained):
    folder, data = trained
    outcome = calibrate(with_method(plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True)), data)
    outcome.close()
    assert len([i for i in outcome.record.layers if i < 4]) == len([i for i in outcome.record.layers if i >= 4]) == 3
    assert all(c.score.judged_by == c.score.guard_divergence for c in outcome.record.candidates)
    gone = {tuple(i for i in range(8) if i not in c.kept) for c in outcome.record.candidates if c.data == "part"}
    assert {1, 2, 3} == {a for a, _ in gone} and {5, 6, 7} == {
        b for _, b in gone
    }  # every start behind the first layers


def test_the_command_cuts_and_proves_on_pairs(trained, tmp_path):
    folder, _ = trained
    words(folder)
    lines = (f"{' '.join(WORDS[(k + j) % 25] for j in range(7))}\t{WORDS[k % 25]} {WORDS[k % 7]}" for k in range(60))
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    call = ["shrink", str(folder), "--layers", "3", "--calibrate", str(tmp_path / "a.tsv"), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "out" / "surgery.json").read_text())
    assert record["decided"]["calibration"]["name"] == "pairs" and "local" in record["decided"]["healing"]
    assert record["proof"]["compared"]["loss"]["result"] > 0


def test_data_that_is_named_becomes_pairs(trained, tmp_path):
    folder, _ = trained
    (tmp_path / "a.txt").write_text("no tokenizer")
    with pytest.raises(UsageError):
        sample_data_of_all(open_source(str(folder)), [str(tmp_path / "a.txt")], None, None, 0, print)
    with pytest.raises(UsageError, match="--calibrate task:digits"):
        sample_data_of_all(open_source(str(folder)), ["task:digits"], None, None, 0, print)
