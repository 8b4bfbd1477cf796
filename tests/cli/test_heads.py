"""`leansurgeon heads` from the outside: one JSON document, tables of 80 columns, one sentence for what cannot be."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

from leansurgeon.cli.main import main
from tests.support.models.word_models import WORDS, words

QUICK = ("--samples", "64", "--judge-samples", "40", "--steps", "4")


@pytest.fixture
def leansurgeon(capsys, monkeypatch):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leansurgeon", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return run


def test_a_vision_model_in_text_and_json(leansurgeon, saved, tmp_path):
    folder, _ = saved("vit")
    data = ("--data", "task:digits")
    code, out, err = leansurgeon("heads", folder, *data, *QUICK, "--ablate", "--prune", "50%", "-o", tmp_path / "o")
    assert code == 0, err
    assert max(map(len, (line for line in out.splitlines() if str(tmp_path) not in line))) <= 80
    assert re.search(r"\b4 before, 2 now\b", out, re.S) and re.search(r"\b40 held-out\b", out, re.S)

    code, out, err = leansurgeon("heads", folder, *data, *QUICK, "--json")
    found = json.loads(out)
    assert code == 0 and found["family"] == "vit" and found["samples"]["importance"] == 64
    assert [len(entry["importance"]) for entry in found["attentions"]] == [4, 4, 4, 4]
    assert found["curve"]["orders"]["importance"][0]["accuracy"] == found["whole"]["accuracy"]


def test_on_a_run_the_result_stays_in_its_folder(leansurgeon, saved, tmp_path):
    folder, _ = saved("vit")
    run = tmp_path / "run"
    run.mkdir()
    shutil.move(folder, run / "model")
    (run / "recipe.yaml").write_text("version: 1\n")
    code, out, err = leansurgeon("heads", run, "--data", "task:digits", *QUICK, "--no-curve", "--json")
    assert code == 0 and json.loads((run / "heads.json").read_text()) == json.loads(out), err


@pytest.fixture
def t5(saved, tmp_path):
    """A tiny T5 with a tokenizer, 60 sentences, and the same as pairs."""
    folder, _ = saved("t5")
    words(folder)
    lines = [" ".join(WORDS[(7 * i + 3 * j) % 50] for j in range(12)) for i in range(60)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    (tmp_path / "pairs.tsv").write_text("\n".join(f"{line}\t{line[:11]}" for line in lines))
    return folder


FEW = ("--samples", 24, "--judge-samples", 8, "--steps", 2, "--json")


@pytest.mark.parametrize(("data", "kind"), [("text.txt", "hidden spans"), ("pairs.tsv", "pairs")])
def test_two_stacks_are_scored_apart(data, kind, leansurgeon, t5, tmp_path):
    code, text, err = leansurgeon("heads", t5, "--data", tmp_path / data, *FEW)
    assert code == 0, err
    found = json.loads(text)
    assert kind in found["data"]["says"] and list(found["kinds"]) == ["encoder", "decoder", "cross"]
    assert sum(k["share"] for k in found["kinds"].values()) == pytest.approx(1.0)
    assert list(found["curve"]["by_kind"]) == ["encoder", "decoder", "cross"]


def test_hidden_spans_are_those_of_t5(tmp_path):
    """The pair of the T5 paper's figure 2: sentinels for spans in the input, spans behind sentinels in the answer."""
    from leansurgeon.measure.data.pairs import name_spans, replace_spans

    # Thank you for inviting me to your party last week .
    ids = list(range(10, 21))
    given, answer = name_spans(ids, [(2, 4), (8, 9)], [100, 101, 102], 1)
    assert given == [10, 11, 100, 14, 15, 16, 17, 101, 19, 20]
    assert answer == [100, 12, 13, 101, 18, 102, 1]
    assert replace_spans(ids, [(2, 4)], lambda _: 7) == [10, 11, 7, *ids[4:]]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("digits-vit --data task:digits", 2, r"\bpreset\b"),
        ("MODEL", 2, "needs sample data"),
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
def test_what_cannot_be_is_one_sentence(arguments, code, says, leansurgeon, saved, tmp_path):
    model = saved("vit")[0] if "MODEL" in arguments else None
    given = arguments.replace("MODEL", str(model)).replace("OUT", str(tmp_path / "out"))
    found, out, err = leansurgeon("heads", *given.split())
    assert found == code and re.search(says, err) and not out, err
    assert "Traceback" not in err and not (tmp_path / "out").exists()


def test_data_without_a_name_is_no_data(leansurgeon, saved):
    folder, _ = saved("vit")
    code, _, err = leansurgeon("heads", folder, "--data", "")
    assert code == 2 and "--data" in err
