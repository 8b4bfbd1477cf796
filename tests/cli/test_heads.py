"""`leansurgeon heads` from the outside: one JSON document, tables of 80 columns, one sentence for what cannot be."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.cli.answers import document, read, typed, works
from tests.support.models.word_models import WORDS, words

QUICK = "--data task:digits --samples 64 --judge-samples 40 --steps 4"


def test_a_vision_model_in_text_and_json(saved, tmp_path):
    folder, _ = saved("vit")
    out = works(f"heads {folder} {QUICK} --ablate --prune 50% -o {tmp_path}/o").stdout
    assert max(map(len, (line for line in out.splitlines() if str(tmp_path) not in line))) <= 80
    assert re.search(r"\b4 before, 2 now\b", out, re.S) and re.search(r"\b40 held-out\b", out, re.S)

    # Of a run the result stays in its folder.
    run = tmp_path / "run"
    run.mkdir()
    shutil.move(folder, run / "model")
    (run / "recipe.yaml").write_text("version: 1\n")
    found = document(f"heads {run} {QUICK}")
    assert found["family"] == "vit" and found["samples"]["importance"] == 64
    assert [len(entry["importance"]) for entry in found["attentions"]] == [4, 4, 4, 4]
    assert found["curve"]["orders"]["importance"][0]["accuracy"] == found["whole"]["accuracy"]
    assert read(run / "heads.json") == found


@pytest.fixture
def t5(saved, tmp_path):
    """A tiny T5 with a tokenizer, 60 sentences, and the same as pairs."""
    folder, _ = saved("t5")
    words(folder)
    lines = [" ".join(WORDS[(7 * i + 3 * j) % 50] for j in range(12)) for i in range(60)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    (tmp_path / "pairs.tsv").write_text("\n".join(f"{line}\t{line[:11]}" for line in lines))
    return folder


@pytest.mark.parametrize(("data", "kind"), [("text.txt", "hidden spans"), ("pairs.tsv", "pairs")])
def test_two_stacks_are_scored_apart(data, kind, t5, tmp_path):
    found = document(f"heads {t5} --data {tmp_path}/{data} --samples 24 --judge-samples 8 --steps 2")
    assert kind in found["data"]["says"] and list(found["kinds"]) == ["encoder", "decoder", "cross"]
    assert sum(k["share"] for k in found["kinds"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("digits-vit --data task:digits", 2, r"\bpreset\b"),
        ("MODEL", 2, "needs sample data"),
        ("MODEL --data ''", 2, "--data"),
        ("MODEL --data task:digits --prune 40%", 2, "belong together"),
        ("MODEL --data task:digits -o OUT", 2, "belong together"),
        ("MODEL --data task:digits --prune 10% -o OUT", 2, r"\b10%.*\b4 heads\b"),
        ("MODEL --data task:digits --prune 40 -o OUT", 2, "such as 40%"),
        ("MODEL --data task:listops", 2, "takes images"),
        ("MODEL --data nowhere", 2, r"--data nowhere\b"),
        ("nowhere/at/all --data task:digits", 2, r"\bnowhere\b"),
    ],
    ids=lambda v: str(v).replace("/", "_"),
)
def test_what_cannot_be_is_one_sentence(arguments, code, says, saved, tmp_path):
    model = saved("vit")[0] if "MODEL" in arguments else None
    done = typed(f"heads {arguments}".replace("MODEL", str(model)).replace("OUT", str(tmp_path / "out")))
    assert done.returncode == code and re.search(says, done.stderr) and not done.stdout, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
