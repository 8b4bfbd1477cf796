"""Advice is taken: what a refusal says to type is typed, and every command and option that a text of the package names
is there.
"""

from __future__ import annotations

import ast
import re

import pytest
import torch
import transformers
from huggingface_hub import constants
from typer.main import get_command

from leansurgeon.cli.main import app
from leansurgeon.commands import in_memory
from leansurgeon.errors import UnsupportedModel
from leansurgeon.version import PACKAGE
from tests.cli.answers import typed, works
from tests.support.models import strangers

SPEECH = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
FOREIGN = {"--private", "--nproc-per-node", "--version", "--help", "--outtype", "--standalone"}  # of other programs
OTHERS = ("reload_check.py", "launch.py")  # which `prove` calls, and which calls torchrun


def texts(tree: ast.Module) -> list[str]:
    """Every text of a module that is no docstring, with X for what is filled in."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def options():
    """The options of every command."""

    def of(command, name):
        """The options of a command, and of those below it."""
        with command.make_context(name, [], resilient_parsing=True) as context:
            names = command.list_commands(context) if hasattr(command, "list_commands") else []
            below = [of(command.get_command(context, one), one) for one in names]
        own = {spelling for one in command.params for spelling in (*one.opts, *one.secondary_opts)}
        return own.union(*below)

    group = get_command(app)
    with group.make_context("leansurgeon", [], resilient_parsing=True) as context:
        return {name: of(group.get_command(context, name), name) for name in group.list_commands(context)}


def test_every_option_that_a_text_names_is_one(options):
    known, strange = set.union(*options.values()) | FOREIGN, []
    for path, tree in SPEECH.items():
        if path.name in OTHERS:
            continue
        for text in texts(tree):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text):
                if option not in known and text != option:
                    strange.append(f"{path.name}: {option} in {text!r}")
    assert not strange


def test_every_command_that_a_text_names_takes_the_options_that_stand_behind_it(options):
    seen = 0
    for path, tree in SPEECH.items():
        for text in texts(tree):
            for line in re.findall(r"`leansurgeon ([^`]+)`", text):
                name, *rest = line.split()
                assert name in options or not name.isalpha() or name == "X", f"{path.name}: {text!r}"
                strange = [word for word in rest if word.startswith("--") and word not in options.get(name, {word})]
                assert not strange, f"{path.name}: {text!r}"
                seen += 1
    assert seen > 30


@pytest.fixture
def place(tmp_path):
    """A folder with a small `my-model` and `texts`."""
    strangers.model(tmp_path / "my-model", "llama", num_hidden_layers=4)
    strangers.texts(tmp_path / "texts")
    return tmp_path


def test_layers_that_are_named_are_kept_by_another_option(place):
    done = typed("shrink my-model --layers 1-3", cwd=place)
    assert done.returncode == 2
    advice = re.search(r"--keep 1-3", done.stderr)[0]
    done = works(f"shrink my-model --uncalibrated -o out {advice}", cwd=place)
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "my-model")
    kept = transformers.AutoModelForCausalLM.from_pretrained(place / "out")
    assert len(kept.model.layers) == 3
    assert torch.equal(kept.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


def test_data_is_what_a_model_without_a_recipe_is_healed_on(place):
    done = typed("retrain my-model", cwd=place)
    assert done.returncode == 2 and done.stderr.splitlines()[1].split()[0] == "--data"
    done = works("retrain my-model --data texts --dry-run", cwd=place)


@pytest.mark.parametrize("time", ["1h30h", "30", "30m1h", "0s"])
def test_times_that_are_none(place, time):
    done = typed(f"retrain my-model --data texts --time {time}", cwd=place)
    assert done.returncode == 2 and time in done.stderr


def test_a_name_of_the_hub_is_not_asked_for_offline(place, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = typed("shrink nobody/has-this --layers 2", cwd=place)
    assert done.returncode == 3 and "not asked" in done.stderr and "HF_HUB_OFFLINE" in done.stderr


def test_the_lines_for_an_adapter_make_a_model(place, monkeypatch):
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "my-model")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = str(place / "my-model")
    model.save_pretrained(place / "adapter")
    commands = ("shrink adapter --layers 2", "inspect adapter", "retrain adapter --data texts")
    for command in commands:
        done = typed(command, cwd=place)
        assert done.returncode == 3 and "AutoPeftModel" in done.stderr, done.stderr
    lines = [line.strip() for line in done.stderr.splitlines() if re.search(r"import |AutoPeftModel\w+\.", line)]
    monkeypatch.chdir(place)
    exec("\n".join(lines), {})
    merged = transformers.AutoModelForCausalLM.from_pretrained(place / "FOLDER")
    ids = torch.arange(3, 11)[None]
    assert torch.allclose(merged(ids).logits, model(ids).logits, atol=1e-5)


def test_the_lines_for_a_pickle_make_a_model_that_can_be_healed(place, monkeypatch):
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "my-model")
    (place / "my-model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), place / "my-model" / "pytorch_model.bin")
    done = typed("retrain my-model --data texts", cwd=place)
    assert done.returncode == 3
    lines = [line.strip() for line in done.stderr.splitlines()]
    monkeypatch.chdir(place)
    exec("\n".join(line for line in lines if "import " in line or "save_pretrained" in line), {})
    made = transformers.AutoModelForCausalLM.from_pretrained(place / "FOLDER")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in made.state_dict().items())
    assert typed("inspect my-model --allow-pickle", cwd=place).returncode == 0


def test_a_model_in_a_wrapper_is_told_what_to_give(place):
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "my-model")
    with pytest.raises(UnsupportedModel, match=r"model\.module"):
        in_memory.write_copy(torch.nn.DataParallel(model))
    in_memory.write_copy(torch.nn.DataParallel(model).module)


def test_a_cut_that_changes_nothing_is_refused_and_its_advice_works(place):
    done = typed("shrink my-model", cwd=place)
    assert done.returncode == 2 and not (place / "runs").exists()
    advice = re.findall(r"--[a-z-]+ (?:-?\d+%|\d+x|\d+)", done.stderr)
    assert advice
    for words in advice:
        words = words.replace("--layers 6", "--layers 2").replace("--mlp-dim 512", "--mlp-dim 16")
        done = typed(f"shrink my-model {words} --dry-run", cwd=place)
        assert done.returncode == 0, (words, done.stderr)


def test_two_forms_of_one_output_are_refused(tmp_path):
    done = typed("report runs --format csv --json", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert re.search(r"--json and --format csv", done.stderr)
