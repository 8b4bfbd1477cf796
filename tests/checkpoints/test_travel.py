"""What lies beside the weights travels byte for byte, with every command and every kind of model."""

import json
from pathlib import Path

import pytest
import transformers

import leansurgeon
from tests.support.command_line import leansurgeon as typed
from tests.support.models import strangers

OURS = ("config.json", "README.md", "surgery.json", "model.safetensors")
SHORT = {"train.duration": "2st", "train.batch": 4}
QUICK = ["--samples", "16", "--judge-samples", "16", "--no-curve", "--prune", "50%", "--no-heal"]


def as_published(folder: Path) -> Path:
    """Files as their publisher left them: cut lengths, odd blanks, templates, terms."""
    if (file := folder / "tokenizer.json").is_file():
        said = json.loads(file.read_text())
        said |= {
            "truncation": {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None}
            | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"},
        }
        file.write_text(json.dumps(said, indent=4) + "\n\n")
        (folder / "special_tokens_map.json").write_text('{"pad_token":  "<pad>"}')
        (folder / "spm.model").write_bytes(bytes(range(256)))
    (folder / "generation_config.json").write_text('{ "eos_token_id":[1,4],  "do_sample": true, "temperature": 0.6 }')
    (folder / "chat_template.jinja").write_text("{{ messages }}\r\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    for name in ("LICENSE.txt", "NOTICE", "USE_POLICY.md"):
        (folder / name).write_text(f"{name} \n")
    return folder


def decoder(folder: Path) -> Path:
    return strangers.model(folder, "llama")


def embedder(folder: Path) -> Path:
    """As sentence-transformers saves one."""
    made = strangers.encoder(folder)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=1))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension":32,"pooling_mode_mean_tokens":true}')
    (folder / "sentence_roberta_config.json").write_text('{"max_seq_length": 32}')
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "w1 "}}')
    return made


def classes(folder: Path) -> Path:
    return strangers.processor(
        strangers.model(folder, "vit", num_labels=2, id2label={0: "ant", 1: "bee"}, num_channels=3), 8, 3
    )


def timm_classes(folder: Path) -> Path:
    return strangers.timm_vit(folder, 2)


# Kinds of models, and which of the commands that train or look at data are tried on them beside cut and undo.
KINDS = {
    decoder: ("retrain", "heads"),
    embedder: ("retrain",),
    classes: ("heads",),
    timm_classes: ("retrain",),
}


def data_for(kind: object, folder: Path) -> Path:
    if kind in (classes, timm_classes):
        return strangers.pictures(folder / "data")
    return strangers.texts(folder / "data")


def unchanged(source: Path, result: Path, *but: str) -> None:
    """Every file beside the weights is there with the same bytes."""
    for file in source.rglob("*"):
        name = file.relative_to(source)
        if file.is_file() and str(name) not in (*OURS, *but):
            assert (result / name).read_bytes() == file.read_bytes(), name


def done(*words: object) -> None:
    ran = typed(*words)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_files_beside_the_weights_travel_with_every_command(kind, tmp_path):
    source, data = as_published(kind(tmp_path / "source")), data_for(kind, tmp_path)
    quick = ("--uncalibrated", "--no-proof", "-o")
    done("shrink", source, "--heads", "2x", "--head-dim", "keep", *quick, tmp_path / "wide")
    unchanged(source, tmp_path / "wide")
    done("undo", tmp_path / "wide", "-o", tmp_path / "back")
    unchanged(source, tmp_path / "back")
    done("shrink", source, "--layers", "2", *quick, tmp_path / "lean")
    unchanged(source, tmp_path / "lean")
    if "retrain" in KINDS[kind]:
        ran = strangers.healed(tmp_path / "lean", data, tmp_path / "run")
        assert ran.returncode == 0, ran.stderr
        for model in (tmp_path / "run").glob("*/config.json"):
            unchanged(source, model.parent)
    if "heads" in KINDS[kind]:
        done("heads", source, "--data", data, *QUICK, "-o", tmp_path / "pruned")
        unchanged(source, tmp_path / "pruned")


def test_a_probe_leaves_a_tokenizer_as_it_was_read(tmp_path):
    from leansurgeon.tasks.text import vocab

    folder = as_published(decoder(tmp_path / "source"))
    plain = transformers.AutoTokenizer.from_pretrained(folder)
    plain.save_pretrained(tmp_path / "plain")
    vocab.load(folder).save_pretrained(tmp_path / "ours")
    assert (tmp_path / "ours/tokenizer.json").read_bytes() == (tmp_path / "plain/tokenizer.json").read_bytes()


def test_a_new_tokenizer_cuts_no_texts_and_leaves_nothing_of_the_old(tmp_path):
    """Read as every other reader of tokenizer.json does."""
    from tokenizers import Tokenizer

    source, data = as_published(decoder(tmp_path / "source")), strangers.texts(tmp_path / "data")
    words = ("--new-tokenizer", "--set", "task.tokenizer=char", "--set", "task.vocab_size=null")
    ran = strangers.healed(source, data, tmp_path / "run", *words)
    assert ran.returncode == 0, ran.stderr
    made = tmp_path / "run" / "model"
    assert len(Tokenizer.from_file(str(made / "tokenizer.json")).encode("w1 w2 " * 30).ids) > 150
    for name in ("spm.model", "chat_template.jinja", "additional_chat_templates/tools.jinja"):
        assert not (made / name).exists()
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == 3  # its own [SEP]


def test_settings_and_tokenizer_in_memory_count(tmp_path):
    """A chat model with a third end of its turns, and a tokenizer whose template was taken away."""
    folder = as_published(decoder(tmp_path / "source"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = [1, 4, 17]
    tokenizer.chat_template = None
    tokenizer.model_max_length = 17
    tokenizer.save_pretrained(tmp_path / "own")
    before = {f.name: f.read_bytes() for f in (tmp_path / "own").iterdir()}
    how = {"tokenizer": tokenizer, "proof": False, "progress": False}
    data = strangers.texts(tmp_path / "data")
    lean = leansurgeon.shrink(model, layers=2, uncalibrated=True, **how)
    assert lean.generation_config.eos_token_id == [1, 4, 17] == model.generation_config.eos_token_id
    written = lean.leansurgeon.folder
    assert json.loads((written / "generation_config.json").read_text())["eos_token_id"] == [1, 4, 17]
    assert {name: (written / name).read_bytes() for name in before} == before
    assert not (written / "chat_template.jinja").exists() and not (written / "spm.model").exists()
    healed = leansurgeon.heal(lean, data, set=SHORT, out=tmp_path / "run", progress=False)
    assert healed.generation_config.eos_token_id == [1, 4, 17]
    assert {name: (healed.leansurgeon.folder / name).read_bytes() for name in before} == before
