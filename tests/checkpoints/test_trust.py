"""No code of a checkpoint runs without a flag: what it names is passed over or refused, and never executed."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.foreign import trust
from leansurgeon.checkpoints.loading import load as load_anything
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.proof.prove import how_to_load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from tests.conftest import build
from tests.support.command_line import leansurgeon

EVIL = """
from pathlib import Path
Path({mark!r}).write_text("ran")
from transformers import {base}
class {name}({base}):
    pass
"""


@pytest.fixture(autouse=True)
def _nothing_allowed():
    trust.allow(False)
    yield
    trust.allow(False)


@pytest.fixture
def mark(tmp_path) -> Path:
    """A file that foreign code would make."""
    return tmp_path / "mark"


def edit(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def llama_with(saved, mark: Path, full: str, name: str = "LlamaForCausalLM") -> Path:
    """A Llama whose config names code beside it."""
    folder, _ = saved("llama")
    edit(folder, auto_map={"AutoModelForCausalLM": full}, architectures=[name])
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark), base="LlamaForCausalLM", name=name))
    return folder


@pytest.fixture(scope="module")
def made_once(tmp_path_factory) -> Path:
    """BERT with heads that no library stores: its modelling file travels."""
    place = tmp_path_factory.mktemp("trust")
    build("bert").save_pretrained(place / "bert")
    done = leansurgeon("shrink", place / "bert", "--heads", "8", "--head-dim", "keep", "-o", place / "ours")
    assert done.returncode == 0 and (place / "ours" / "decoupled_bert.py").is_file()
    return place / "ours"


@pytest.fixture
def ours(made_once, tmp_path) -> Path:
    """Such a result, to be changed."""
    return shutil.copytree(made_once, tmp_path / "ours")


def test_an_auto_map_beside_a_known_model_type_is_passed_over(saved, tmp_path, mark):
    folder = llama_with(saved, mark, "evil.LlamaForCausalLM")
    done = leansurgeon("shrink", folder, "--heads", "8", "-o", tmp_path / "out", "--json")
    assert done.returncode == 0 and not mark.exists()
    proof = json.loads(done.stdout)["proof"]
    assert proof["loaded_with"] == "transformers.LlamaForCausalLM.from_pretrained"
    assert proof["compared"]["done"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "auto_map" not in written and not list((tmp_path / "out").glob("*.py"))
    for full in (f"{folder}--evil.LlamaForCausalLM", "a/b--evil.X", "evil.LlamaForCausalLM"):
        edit(folder, auto_map={"AutoModelForCausalLM": full})
        for command in (["undo", tmp_path / "out", "-o", tmp_path / "back", "--force"], ["inspect", folder]):
            assert leansurgeon(*command).returncode == 0
        load(folder)
    assert not mark.exists()


def test_a_class_that_only_the_checkpoint_has_is_the_librarys(saved, tmp_path, mark):
    folder = llama_with(saved, mark, "evil.EvilForCausalLM", "EvilForCausalLM")
    done = leansurgeon("shrink", folder, "--layers", "2", "--uncalibrated", "--no-proof", "-o", tmp_path / "out")
    assert done.returncode == 0 and not mark.exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert type(load(folder).model).__name__ == "LlamaForCausalLM" and not mark.exists()


def change(folder: Path, mark: Path) -> None:
    """The travelling file does something else; surgery.json is gone."""
    file = folder / "decoupled_bert.py"
    file.write_text(f"open({str(mark)!r}, 'w').write('ran')\n" + file.read_text())
    (folder / "surgery.json").unlink(missing_ok=True)


COMMANDS = (
    "shrink MODEL --layers 2 --uncalibrated -o OUT",
    "undo MODEL -o OUT",
    "inspect MODEL",
    "plan MODEL --layers 2",
    "diff MODEL MODEL",
    "bench MODEL",
    "kappa MODEL --data task:digits",
    "heads MODEL --data task:digits",
    "search MODEL --params 1M --dry-run",
    "retrain MODEL --recipe digits-vit --dry-run",
)


def test_a_changed_modelling_file_is_refused(ours, tmp_path, mark):
    change(ours, mark)
    for command in COMMANDS:
        words = [{"MODEL": ours, "OUT": tmp_path / "out"}.get(word, word) for word in command.split()]
        done = leansurgeon(*words)
        assert done.returncode == 3, (command, done.stderr)
        assert "--trust-remote-code" in done.stderr and "decoupled_bert.py" in done.stderr
        assert not mark.exists() and not (tmp_path / "out").exists()
    with pytest.raises(UnsupportedModel):
        load(ours)


def test_a_modelling_file_that_is_named_and_not_ours(ours):
    shutil.copy(ours / "decoupled_bert.py", ours / "evil.py")
    edit(ours, auto_map={"AutoModelForMaskedLM": "evil.DecoupledBertForMaskedLM"})
    with pytest.raises(UnsupportedModel) as error:
        open_source(str(ours))
    assert "evil.py" in error.value.message


def test_the_flag_runs_it_and_the_record_names_it(ours, tmp_path, mark):
    folder = ours
    change(folder, mark)
    done = leansurgeon("shrink", folder, "--heads", "16", "-o", tmp_path / "out", "--trust-remote-code", "--json")
    assert done.returncode == 0 and mark.exists(), done.stderr
    proof = json.loads(done.stdout)["proof"]
    assert proof["loaded_with"].endswith("trust_remote_code=True") and proof["compared"]["done"]
    record = json.loads((tmp_path / "out" / "surgery.json").read_text())
    code = (folder / "decoupled_bert.py").read_bytes()
    assert record["source"]["code"] == {"decoupled_bert.py": hashlib.sha256(code).hexdigest()}
    assert (tmp_path / "out" / "decoupled_bert.py").read_bytes() == code  # what was proven is what travels
    assert leansurgeon("inspect", folder).returncode == 3  # the next command has no flag
    assert leansurgeon("undo", tmp_path / "out", "-o", tmp_path / "back", "--trust-remote-code").returncode == 0
    assert (tmp_path / "back" / "decoupled_bert.py").read_bytes() == code


def test_a_file_that_is_ours_is_taken_from_the_package(ours, tmp_path, monkeypatch):
    assert trust.is_shipped(ours / "decoupled_bert.py")
    assert type(load(ours).model).__module__ == "leansurgeon.models.decoupled_bert"
    old = b"# what an earlier version shipped\nraise SystemExit\n"
    (ours / "decoupled_bert.py").write_bytes(old)
    with pytest.raises(UnsupportedModel):
        open_source(str(ours))
    earlier = {"decoupled_bert.py": [hashlib.sha256(old).hexdigest()]}
    monkeypatch.setattr(trust, "earlier", lambda: earlier)
    done = leansurgeon("shrink", ours, "--heads", "16", "-o", tmp_path / "again", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["proof"]["compared"]["done"]
    (ours / "decoupled_bert.py").unlink()  # the package has it
    assert open_source(str(ours)).architecture.code is None


def test_a_result_of_a_version_with_other_files_goes_on_loading(ours, tmp_path, monkeypatch):
    """RoBERTa and mBART had files of their own once; what names them is taken from the file of today."""
    old, text = ours / "decoupled_roberta.py", b"raise SystemExit\n"
    (ours / "decoupled_bert.py").unlink()
    old.write_bytes(text)
    config = ours / "config.json"
    config.write_text(config.read_text().replace("decoupled_bert.", "decoupled_roberta."))
    with pytest.raises(UnsupportedModel):  # a file of that name, and not one of ours
        load(ours)
    monkeypatch.setattr(trust, "earlier", lambda: {old.name: [hashlib.sha256(text).hexdigest()]})
    model = load_anything(str(ours))
    assert type(model).__module__ == "leansurgeon.models.decoupled_bert"
    model.save_pretrained(tmp_path / "again")  # with the file of today, and names of what is in it
    assert (tmp_path / "again" / "decoupled_bert.py").is_file()
    assert "decoupled_roberta" not in (tmp_path / "again" / "config.json").read_text()


def test_code_beside_a_modelling_file_of_ours_does_not_run(ours):
    """transformers runs custom_generate, and classes that tokenizers name, of every folder that it may run code of."""
    assert how_to_load(ours, as_documented=True)["trust"]
    files = {"custom_generate/generate.py": "raise SystemExit", "tokenizer_config.json": '{"auto_map": {}}'}
    for name, text in files.items():
        folder = Path(shutil.copytree(ours, ours.with_name(f"with {Path(name).name}")))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        how = how_to_load(folder, as_documented=True)
        assert "trust" not in how and how["module"] == "leansurgeon.models.decoupled_bert"


def test_every_file_that_travels_is_known_and_so_are_those_of_before():
    room = Path(trust.__file__).parents[1] / "models"
    for file in room.glob("*.py"):
        assert trust.is_shipped(file)
    gone = {"decoupled_roberta.py": "8b637d6c", "decoupled_mbart.py": "12f21fc5"}  # results with these files are about
    for name, digest in gone.items():
        assert not (room / name).exists() and any(d.startswith(digest) for d in trust.earlier()[name])


def test_a_kernel_of_the_hub_is_refused(saved):
    folder, _ = saved("llama")
    asked = {"attn_implementation": "somebody/kernel"}
    for changes in (asked, {"attn_implementation": None, "text_config": asked}):
        edit(folder, **changes)
        for opened in (lambda: open_source(str(folder)), lambda: load(folder)):
            with pytest.raises(UnsupportedModel, match="somebody/kernel"):
                opened()
    edit(folder, attn_implementation="eager", text_config=None)
    open_source(str(folder))


def test_a_timm_config_loads_no_weights_but_its_own(tmp_path):
    config = {"architecture": "vit_tiny_patch16_224", "model_args": {"depth": 2, "pretrained": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == config
    for key, value in (("checkpoint_path", "evil.pth"), ("pretrained", True)):
        edit(tmp_path, model_args={"depth": 2, key: value})
        with pytest.raises(UnsupportedModel) as error:
            read_config(tmp_path)
        assert key in error.value.message and repr(value) in error.value.message


@pytest.mark.parametrize("way", ["adapter", "link of an adapter", "file"])
def test_a_library_loads_no_weights_but_those_that_are_read(way, saved, tmp_path):
    """transformers would take the file that the config names, and put adapters on top (a pickle, if they are one)."""
    folder, _ = saved("bert")
    load(folder)
    if way == "file":
        shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
        edit(folder, transformers_weights="other.safetensors")
    elif way == "adapter":
        said = {"peft_type": "LORA", "base_model_name_or_path": "somebody/else", "target_modules": ["query"], "r": 1}
        (folder / "adapter_config.json").write_text(json.dumps(said))
    else:
        (folder / "adapter_config.json").symlink_to(tmp_path / "nowhere")
    for opened in (lambda: open_source(str(folder)), lambda: load(folder)):
        with pytest.raises(UnsupportedModel, match=r"\btransformers_weights\b|\badapter_config\.json\b"):
            opened()


# No classes; classes of something else; of another family, whose weights would all be made anew without an error.
@pytest.mark.parametrize("name", ["pipeline", "BertConfig", "AutoModel", "ViTModel"])
def test_a_class_that_is_none_of_the_family_is_refused(name, saved):
    folder, _ = saved("bert")
    edit(folder, architectures=[name])
    with pytest.raises(UnsupportedModel, match=rf"\b{name}\b"):
        load(folder)


def test_a_tokenizer_with_code_is_not_run(saved, tmp_path, mark, monkeypatch):
    from leansurgeon.tasks.text import vocab

    folder = tmp_path / "tokens"
    folder.mkdir()
    said = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark), base="BertTokenizer", name="Evil"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the library asks, and somebody pipes `yes`
    with pytest.raises(UsageError):
        vocab.load(folder)
    assert not mark.exists()
