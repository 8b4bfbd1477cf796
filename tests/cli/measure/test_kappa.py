"""`leansurgeon kappa` from the outside: numbers against numpy on the same samples, tables of 80
columns, one sentence for what cannot be.
"""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.commands.samples import data_to_measure
from tests.cli.answers import document, typed
from tests.support.models.word_models import sentence_encoder
from tests.support.report.report_fixtures import summary, write


def by_hand(folder, batches: list[dict]) -> list[list[float]]:
    """numpy's condition numbers of what enters every output projection, sample by sample, padding cut off."""
    loaded, blocks = load(folder), []
    loaded.model.eval()
    for name in loaded.projections:  # in the order of the layers
        loaded.model.get_submodule(name).register_forward_pre_hook(lambda _, args: blocks.append(args[0]))
    found: list[list[float]] = [[] for _ in loaded.projections]
    for batch in batches:
        blocks.clear()
        with torch.no_grad():
            loaded.model(**{key: value for key, value in batch.items() if key != "labels"})
        for values, block in zip(found, blocks, strict=True):
            real = batch.get("attention_mask", torch.ones(block.shape[:2])).bool()
            values += [np.linalg.cond(one[keep].double().numpy()) for one, keep in zip(block, real, strict=True)]
    return found


def test_kappa_of_images_is_numpys_condition_number(saved):
    folder, _ = saved("vit")
    found = document(f"kappa {folder} --data task:digits --samples 512 --probes 2")
    source = open_source(str(folder))
    hand = by_hand(folder, data_to_measure(source, "task:digits", str(folder), "Kappa", 2, 0, print).heldout)
    assert found["samples"] == len(hand[0]) > 300 and found["forward_dtype"] == "float32"
    for layer, values in zip(found["layers"], hand, strict=True):
        assert layer["median"] == pytest.approx(np.median(values), rel=1e-4)
        assert layer["worst"] == pytest.approx(max(values), rel=1e-3)
        low, high = layer["median_interval"]
        assert low < layer["median"] < high and layer["jacobian"]["at_least"] > 0


def test_a_few_sentences_stand_for_all_of_them(saved, tmp_path):
    """Held-out sentences lie by their length; the first ones would be the shortest."""
    folder, text = sentence_encoder(saved, tmp_path, 600)
    few, all_ = (document(f"kappa {folder} --data {text} --samples {n} --probes 0") for n in (8, 10_000))
    assert few["samples"] == 8 < all_["samples"]
    mean = all_["tokens"] / all_["samples"]
    assert few["tokens"] / few["samples"] == pytest.approx(mean, rel=0.15)
    batches = data_to_measure(open_source(str(folder)), str(text), str(folder), "Kappa", 2, 0, print).heldout
    hand = by_hand(folder, batches)
    assert [layer["median"] for layer in all_["layers"]] == pytest.approx([np.median(v) for v in hand], rel=1e-3)


def test_on_a_run_the_result_is_kept_and_reported(saved, tmp_path):
    folder, _ = saved("vit")
    run = tmp_path / "runs" / "a"
    write(run, summary("lean", experiment=None, kappa=None))
    shutil.move(folder, run / "model")
    train = "train: {duration: 1st, batch: 8, optim: {lr: 1.0e-3}}"
    (run / "recipe.yaml").write_text(f"version: 1\nname: a\nkind: training\ntask: {{name: digits}}\n{train}\n")
    report = f"report --workspace {tmp_path}/runs --kappa --json"
    assert typed(report).returncode == 2
    document(f"kappa {run} --data task:digits --samples 8 --probes 0")
    assert not (run / "kappa.json").exists()  # other data than the run's may have been named
    found = document(f"kappa {run} --samples 16 --probes 2")
    (row,) = json.loads(typed(report).stdout)["sections"][0]["rows"]
    medians = [layer["median"]["value"] for layer in row["kappa"]["layers"]]
    assert medians == [layer["median"] for layer in found["layers"]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("kappa digits-vit", r"\bpreset\b"),
        ("kappa MODEL", "needs sample data"),
        ("kappa MODEL --data nowhere", r"--data nowhere\b"),
        ("kappa MODEL --data task:listops", "takes images"),
        ("kappa nowhere/at/all --data task:digits", r"\bnowhere\b"),
    ],
    ids=lambda v: v.replace("/", "_"),
)
def test_what_cannot_be_is_one_sentence(arguments, says, saved):
    model = saved("vit")[0] if "MODEL" in arguments else None
    done = typed(arguments.replace("MODEL", str(model)))
    assert (done.returncode, done.stdout) == (2, "") and re.search(says, done.stderr), done.stderr
