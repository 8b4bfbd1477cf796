"""What `import leansurgeon` gives: its names and arguments, the same words as the command line, and nothing heavy."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import leansurgeon
from leansurgeon.commands.command import speaking
from leansurgeon.errors import LeanSurgeonError, UsageError
from tests.support.command_line import leansurgeon as run

SHAPE = "heads layers head_dim mlp_dim class_attention"
TRUST = "allow_pickle trust_remote_code"
DATA = "columns classes skip_damaged"
OUT = "dry_run force push public"
SURFACE = {
    "plan": f"source {SHAPE} memory batch tokens precision attention optimizer checkpointing world_size gpu "
    f"tower {TRUST}",
    "shrink": f"source {SHAPE} params data {DATA} samples uncalibrated init method keep more_heads heal "
    f"heal_time balance proof seed out device resume {OUT} tower {TRUST}",
    "retrain": f"model data time {DATA} recipe set lora new_tokenizer gpus cpu_processes out workspace resume "
    f"resume_anyway limit_batches eval_only {OUT} tower trust_remote_code",
    "kappa": f"model data {DATA} samples probes seed tower {TRUST}",
    "heads": f"model data {DATA} samples judge_samples ablate curve steps prune out heal "
    f"seed device force push public tower {TRUST}",
    "diff": f"a b {TRUST}",
    "report": "paths format wide kappa html plots measure data columns time workspace",
    "run": f"source variant heads layers head_dim mlp_dim class_attention data {DATA} time set seeds arms debug gpus "
    "cpu_processes parallel workspace force tower trust_remote_code",
    "search": f"source params memory latency heads layers mlp_dim head_dim data {DATA} samples recipe set "
    f"seed tries out workspace dry_run force tower {TRUST}",
    "load": f"source {TRUST}",
}


def arguments(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_surface_is_what_it_was():
    """Who changes a name or an argument says so in the changelog, and here."""
    assert set(leansurgeon.__all__) == {*SURFACE, "compare", "heal", "errors", "__version__"}
    for name, words in SURFACE.items():
        function = getattr(leansurgeon, name)
        assert arguments(function) - {"tokenizer", "progress"} == set(words.split()), name
        assert function.__doc__ and ">>>" in function.__doc__, name


SAME = [  # words of the terminal, the call that means the same
    (["plan", "vit-b", "--heads", "16", "--layers", "7"], lambda: leansurgeon.plan("vit-b", heads=16, layers=7)),
    (["diff", "vit-b", "deit-b"], lambda: leansurgeon.diff("vit-b", "deit-b")),
    (
        ["shrink", "digits-vit", "--heads", "2x", "--dry-run"],
        lambda: leansurgeon.shrink("digits-vit", heads="2x", dry_run=True, progress=False),
    ),
    (
        ["search", "digits-vit", "--params", "160k", "--dry-run"],
        lambda: leansurgeon.search("digits-vit", params="160k", dry_run=True, progress=False),
    ),
]


@pytest.mark.parametrize(("words", "call"), SAME, ids=lambda one: one[0] if isinstance(one, list) else "")
def test_terminal_and_python_give_the_same(words, call):
    found = call()
    assert run(*words).stdout == f"{found}\n"
    assert json.loads(run(*words, "--json").stdout) == json.loads(json.dumps(found.as_dict()))


def test_importing_it_is_light_and_the_rooms_leave_its_names_alone():
    code = (
        "import sys; before = set(sys.modules)\n"
        "import leansurgeon\n"
        "heavy = {'torch', 'transformers', 'timm', 'numpy', 'typer'} & (set(sys.modules) - before)\n"
        "assert not heavy, heavy\n"
        "import leansurgeon.search.space, leansurgeon.report.rows\n"
        "from leansurgeon.search import space\n"
        "assert callable(leansurgeon.search) and callable(leansurgeon.report)\n"
        "assert sys.modules['leansurgeon.search'].__name__ == 'leansurgeon.search'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-800:]


# -- errors and talk -------------------------------------------------------------------------------


def test_errors_speak_of_arguments_and_end_nothing(tmp_path, capsys):
    with pytest.raises(UsageError) as bad:
        leansurgeon.shrink("digits-vit", heads="7x", head_dim="split", out=tmp_path / "lean", progress=False)
    assert "28 heads" in bad.value.message and "head_dim=" in bad.value.hint and "--" not in str(bad.value)
    with pytest.raises(UsageError) as bad:
        leansurgeon.shrink("digits-vit", layers=2, method="angular", progress=False)
    assert "data=" in bad.value.hint and "method=" in bad.value.message
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError) as bad:
        leansurgeon.shrink("digits-vit", layers=2, out=tmp_path / "taken", progress=False)
    assert "force=True" in bad.value.hint and "out=" in bad.value.hint
    assert capsys.readouterr() == ("", "")


WRONG = [
    lambda: leansurgeon.shrink(7, layers=2),
    lambda: leansurgeon.shrink("digits-vit", heads=True),
    lambda: leansurgeon.shrink("digits-vit", layers=2, progress="loud"),
    lambda: leansurgeon.shrink("digits-vit", layers=2, data=[]),
    lambda: leansurgeon.shrink("digits-vit", layers=2, data=[("a", object())]),
    lambda: leansurgeon.kappa("digits-vit", "task:digits"),
    lambda: leansurgeon.heads("digits-vit", prune=0.5),
    lambda: leansurgeon.load("digits-vit"),
    lambda: leansurgeon.report("nowhere"),
    lambda: leansurgeon.search("digits-vit", params="1k"),
    lambda: leansurgeon.shrink("a" * 5000, layers=2),
]


@pytest.mark.parametrize("call", WRONG)
def test_what_cannot_be_is_an_error_of_the_hierarchy(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LeanSurgeonError) as bad:
        call()
    assert bad.value.exit_code in (2, 3) and len(str(bad.value)) < 3000


def test_progress_goes_where_it_is_wanted(capsys):
    told: list[str] = []
    for progress, heard in ((told.append, ["a line"]), (False, [])):
        told.clear()
        with speaking(progress) as say:
            say("a line")
        assert told == heard and capsys.readouterr() == ("", "")
    with speaking(True) as say:
        say("a line")
    assert capsys.readouterr() == ("", "a line\n")
