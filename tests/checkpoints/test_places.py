"""What is published says nothing of where things lie on this machine, and the source is found again all the same."""

import json
import shutil

import pytest

from leansurgeon.checkpoints import places, record, whereabouts
from leansurgeon.checkpoints.record import Origin
from tests.support.command_line import leansurgeon


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("/home/me/models/llama", "llama"),
        ("/home/me/models/llama/", "llama"),
        ("~/llama", "llama"),
        ("~", "model"),
        ("/", "model"),
        ("C:\\Users\\me\\llama", "llama"),
        ("runs/llama", "runs/llama"),
        ("../llama", "../llama"),
        ("org/llama", "org/llama"),
        ("timm/vit_tiny.in1k", "timm/vit_tiny.in1k"),
        ("/home/me/\udcff-llama", "\\udcff-llama"),  # a byte that is no UTF-8
        ("\udcff", "\\udcff"),
    ],
)
def test_names(typed, kept):
    assert places.public(typed) == kept


def test_folders_whose_names_are_no_text(saved, tmp_path):
    """Names of files are bytes; cards and records are text that every reader takes."""
    folder, made = saved("vit")[0].rename(tmp_path / "\udcff"), tmp_path / "\udcfe"
    assert leansurgeon("shrink", folder, "--heads", "2x", "--no-proof", "-o", made).returncode == 0
    assert record.read(made).source.name == "\\udcff" and "\\udcfe" in (made / "README.md").read_text()


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("/home/me/a b/movie.txt", "movie.txt"),
        ("/data/one.txt,two.txt,/data/three.txt", "one.txt,two.txt,three.txt"),
        ("task:imagenet,data=/data/me/images,crop=0.9", "task:imagenet,data=images,crop=0.9"),
        ("read from /home/me/x.txt: 64 to fit", "read from x.txt: 64 to fit"),
        ("surgery in '/home/me/m/surgery.json' is damaged.", "surgery in 'surgery.json' is damaged."),
        ("windows of 64 tokens, 3/4 of them", "windows of 64 tokens, 3/4 of them"),
        ("width // heads; a/b", "width // heads; a/b"),
        ("org/name, runs/x", "org/name, runs/x"),
        ("https://example.org/a", "https://example.org/a"),
    ],
)
def test_texts(said, kept):
    assert places.without_places({"a": [said, 3]}) == {"a": [kept, 3]}


def test_nothing_that_is_written_holds_the_path(saved, tmp_path):
    folder, _ = saved("vit")
    config = json.loads((folder / "config.json").read_text())
    remote = {"AutoModel": f"{tmp_path}--evil.X"}
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": str(tmp_path / "x"), "auto_map": remote}))
    assert leansurgeon("shrink", folder, "--heads", "8", "-o", tmp_path / "wide").returncode == 0
    assert leansurgeon("shrink", "./wide", "--heads", "16", "--no-proof", "-o", "wider", cwd=tmp_path).returncode == 0
    assert leansurgeon("undo", tmp_path / "wide", "-o", tmp_path / "back").returncode == 0
    for made, name in (("wide", "source-vit"), ("wider", "./wide"), ("back", "wide")):
        for file in (tmp_path / made).iterdir():
            assert str(tmp_path).encode() not in file.read_bytes(), file
        assert f"Made from `{name}`" in (tmp_path / made / "README.md").read_text()


def test_the_source_is_found_by_its_digests(saved, tmp_path, monkeypatch, own_cache):
    folder, _ = saved("vit")
    assert leansurgeon("shrink", folder, "--heads", "8", "--no-proof", "-o", tmp_path / "wide").returncode == 0
    origin = record.read(tmp_path / "wide").source
    assert origin.name == "source-vit"
    monkeypatch.chdir(tmp_path.parent)
    assert whereabouts.find(origin) == folder
    other = shutil.copytree(folder, tmp_path / "elsewhere")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert whereabouts.find(origin) is None  # it is another model now
    whereabouts.remember(origin, other)
    assert whereabouts.find(origin) == other
    assert whereabouts.find(Origin("x", sha256={"../escape": "00"})) is None
