"""What is copied beside the weights is of the model's folder, and nothing else of the machine."""

import json

import pytest

from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.model import load
from leansurgeon.errors import UnsupportedModel
from tests.support.command_line import leansurgeon


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "secret"
    file.write_text("secret")
    return file


def test_a_link_to_elsewhere_is_refused_before_anything_is_written(saved, tmp_path, secret):
    folder, _ = saved("bert")
    (secret.parent / "config.json").write_text("{}")
    for name, target in (("chat_template.jinja", secret), ("tokenizer.json", secret), ("1_Pooling", secret.parent)):
        (folder / name).symlink_to(target)
        done = leansurgeon("shrink", folder, "--layers", "2", "--uncalibrated", "-o", tmp_path / "out")
        assert done.returncode == 3 and name in done.stderr and str(target) in done.stderr
        assert not (tmp_path / "out").exists()
        with pytest.raises(UnsupportedModel):  # as a training saves its model
            load(folder).save(tmp_path / "trained")
        (folder / name).unlink()


def test_links_within_the_folder_and_of_the_hubs_cache_are_copied(tmp_path, secret):
    folder = tmp_path / "models--org--name" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    (blobs / "123").write_text("words")
    (folder / "vocab.txt").symlink_to("../../blobs/123")
    (folder / "real.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to("real.json")
    (tmp_path / "out").mkdir()
    assert companions.copy(folder, tmp_path / "out") == ["tokenizer.json", "vocab.txt"]
    copied = tmp_path / "out" / "vocab.txt"
    assert copied.read_text() == "words" and not copied.is_symlink()
    (folder / "merges.txt").symlink_to("../../../elsewhere/secret")
    with pytest.raises(UnsupportedModel):
        companions.copy(folder, tmp_path / "out")
    (folder / "merges.txt").unlink()
    plain = tmp_path / "snapshots" / "abc"  # looks like the cache and is none
    plain.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_text("x")
    (plain / "vocab.txt").symlink_to("../../blobs/1")
    with pytest.raises(UnsupportedModel):
        companions.copy(plain, tmp_path / "out")


def test_code_that_does_not_travel_is_not_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    said = {"auto_map": {"AutoTokenizer": ["mine.X", None]}, "model_max_length": 64, "ä": "ö"}
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "a" / "generation_config.json").write_text('{ "eos_token_id":2}')
    companions.copy(tmp_path / "a", tmp_path / "b")
    kept = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    assert kept == {"model_max_length": 64, "ä": "ö"}
    assert (tmp_path / "b" / "generation_config.json").read_text() == '{ "eos_token_id":2}'  # byte for byte


def test_a_file_without_end_is_not_copied(tmp_path):
    """Ten terabytes of which no block is on the disk would fill the disk of whoever copies them."""
    with (tmp_path / "tokenizer.json").open("wb") as out:
        out.truncate(10**13)
    with pytest.raises(UnsupportedModel, match="10,000,000,000,000"):
        companions.find_companions(tmp_path)


def test_what_stands_behind_a_sentence_encoder_travels_along(tmp_path, secret):
    """A dense layer with weights, by the name that modules.json gives its folder, and nothing from outside."""
    folder = tmp_path / "source"
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "other/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    paths = ["", "1_Pooling", "2_Dense", "3_Normalize", "../elsewhere", "/etc", "..", 7, None]
    (folder / "modules.json").write_text(json.dumps([*({"path": path} for path in paths), "no module"]))
    wanted = {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    assert set(companions.copy(folder, tmp_path / "out")) == wanted
    assert {str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").rglob("*") if f.is_file()} == wanted
    for damaged in ("[", '{"path": "other"}', "7"):
        (folder / "modules.json").write_text(damaged)
        assert companions.find_companions(folder) == ["modules.json", "1_Pooling/config.json"]
    (folder / "modules.json").write_text(json.dumps([{"path": "2_Dense"}]))
    (folder / "2_Dense" / "model.safetensors").unlink()
    (folder / "2_Dense" / "model.safetensors").symlink_to(secret)
    with pytest.raises(UnsupportedModel):
        companions.find_companions(folder)
