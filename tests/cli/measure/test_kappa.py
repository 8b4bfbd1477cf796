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
from tests.cli.answers import works
from tests.support.command_line import leansurgeon
from tests.support.models.word_models import WORDS, sentence_encoder, words
from tests.support.report.report_fixtures import summary, write


def document(*arguments: object) -> dict:
    done = works("kappa", *arguments, "--json")
    return json.loads(done.stdout)


def by_hand(folder, batches: list[dict]) -> list[list[float]]:
    """numpy's condition numbers of what enters every output projection, sample by sample, padding cut off."""
    loaded = load(folder)
    loaded.model.eval()
    found: list[list[float]] = []
    for name in loaded.projections:
        blocks: list[torch.Tensor] = []
        hook = loaded.model.get_submodule(name).register_forward_pre_hook(
            lambda _m, args, kept=blocks: kept.append(args[0])
        )
        with torch.no_grad():
            for batch in batches:
                loaded.model(**{key: value for key, value in batch.items() if key != "labels"})
        hook.remove()
        real = [
            batch.get("attention_mask", torch.ones(block.shape[:2]))
            for batch, block in zip(batches, blocks, strict=True)
        ]
        found.append(
            [
                np.linalg.cond(one[keep.bool()].double().numpy())
                for block, mask in zip(blocks, real, strict=True)
                for one, keep in zip(block, mask, strict=True)
            ]
        )
    return found


def test_kappa_of_images_is_numpys_condition_number(saved):
    folder, _ = saved("vit")
    found = document(folder, "--data", "task:digits", "--samples", "512", "--probes", "2")
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
    few, all_ = (document(folder, "--data", text, "--samples", n, "--probes", "0") for n in (8, 10_000))
    assert few["samples"] == 8 < all_["samples"]
    mean = all_["tokens"] / all_["samples"]
    assert few["tokens"] / few["samples"] == pytest.approx(mean, rel=0.15)
    batches = data_to_measure(open_source(str(folder)), str(text), str(folder), "Kappa", 2, 0, print).heldout
    hand = by_hand(folder, batches)
    assert [layer["median"] for layer in all_["layers"]] == pytest.approx([np.median(v) for v in hand], rel=1e-3)


def test_the_table_of_an_encoder_with_a_decoder_names_its_attentions(saved, tmp_path):
    folder, _ = saved("t5")
    words(folder)
    lines = [" ".join(WORDS[(7 * i + 3 * j) % 50] for j in range(12)) for i in range(60)]
    (tmp_path / "pairs.tsv").write_text("\n".join(f"{line}\t{line[: 5 + i % 7]}" for i, line in enumerate(lines)))
    done = works("kappa", folder, "--data", tmp_path / "pairs.tsv", "--samples", 12, "--probes", 4)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {" ".join(line.split()[:2]): line.split()[2:] for line in lines if line.strip().startswith(("enc", "cro"))}
    layers = open_source(str(folder)).shape.stages[1].depth
    assert f"cross {layers}" in rows and f"cross {layers + 1}" not in rows and "encoder 1" in rows
    assert "–" in rows["cross 1"]  # its queries and keys read two things, so it has no Jacobian of one input


def test_on_a_run_the_result_is_kept_and_reported(saved, tmp_path):
    folder, _ = saved("vit")
    run = tmp_path / "runs" / "a"
    write(run, summary("lean", experiment=None, kappa=None))
    shutil.move(folder, run / "model")
    train = "train: {duration: 1st, batch: 8, optim: {lr: 1.0e-3}}"
    (run / "recipe.yaml").write_text(f"version: 1\nname: a\nkind: training\ntask: {{name: digits}}\n{train}\n")
    report = ("report", "--workspace", tmp_path / "runs", "--kappa", "--json")
    assert leansurgeon(*report).returncode == 2
    document(run, "--data", "task:digits", "--samples", "8", "--probes", "0")
    assert not (run / "kappa.json").exists()  # other data than the run's may have been named
    found = document(run, "--samples", "16", "--probes", "2")
    (row,) = json.loads(leansurgeon(*report).stdout)["sections"][0]["rows"]
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
    done = leansurgeon(*arguments.replace("MODEL", str(model)).split())
    assert (done.returncode, done.stdout) == (2, "") and re.search(says, done.stderr), done.stderr
