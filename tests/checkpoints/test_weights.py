"""Our safetensors reader and writer against the safetensors library, and against damaged files."""

import errno
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from leansurgeon.checkpoints import weights as w
from leansurgeon.checkpoints.publish.output import output_folder
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.arange(4),
        "empty": torch.zeros(0, 2),
        "d": torch.randn(2, 2, 2, generator=generator).half(),
    }


@pytest.fixture
def opened(tensors, tmp_path):
    """Those tensors in a file of the library, opened by us."""
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    return w.Weights.open(tmp_path / "in")


def copies(opened):
    return [w.TensorOut(name, entry.dtype, entry.shape, entry=entry) for name, entry in opened.entries.items()]


def test_reads_what_the_library_wrote(opened, tensors):
    assert opened.shapes == {k: tuple(v.shape) for k, v in tensors.items()}
    for name in ("a", "b", "d"):
        assert np.array_equal(opened.float32(name), tensors[name].float().numpy())


@pytest.mark.parametrize("kernel", [True, False], ids=["copy_file_range", "no copy_file_range"])
def test_the_library_reads_what_we_wrote(kernel, opened, tensors, tmp_path, monkeypatch):
    def refuses(*args):
        raise OSError(18, "Invalid cross-device link")

    if not kernel:
        monkeypatch.setattr(w.os, "copy_file_range", refuses)
    drawn = np.random.default_rng(0).standard_normal((4, 3), dtype=np.float32)
    new = w.TensorOut("new", "BF16", (4, 3), make=lambda: w.from_float32(drawn, "BF16"))
    w.write(tmp_path / "out", [*copies(opened), new])
    back = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)
    assert torch.equal(back["new"], torch.from_numpy(drawn).bfloat16())


def test_shards_and_index_are_what_transformers_expects(opened, tensors, tmp_path):
    files = w.write(tmp_path / "out", copies(opened), shard_bytes=70)
    assert len(files) > 1
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "out" / shard, "pt") as handle:
            assert torch.equal(handle.get_tensor(name), tensors[name])
    assert w.Weights.open(tmp_path / "out").shapes == opened.shapes


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: object) -> dict:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


DAMAGED = [
    (b"", "has 0 bytes"),
    (b"\x80\x02}q\x00(X\x06\x00\x00\x00weight", r"header\b.*\d"),
    (struct.pack("<Q", 8) + b"notjson!", "JSON"),
    (header(entry(), b"1234"), "truncated"),
    (header(entry(shape=[3]), bytes(8)), "damaged"),
    (header(entry(dtype="Q4", shape=[1], data_offsets=[0, 1]), b"1"), "dtype 'Q4'"),
    (header({"a": 3}), "damaged"),
    (header([1, 2]), r"header\b.*\blist\b"),
    (header(entry(), bytes(8) + b"behind"), None),
    (header(entry(shape=[-1, -2]), bytes(8)), None),
    (header(entry(shape=[2**47, 2**47]), bytes(8)), None),
    (header(entry(data_offsets=[0, 8, 8]), bytes(8)), None),
    (header(entry(dtype=["F32"]), bytes(8)), None),
    (struct.pack("<Q", 10_000) + b"[" * 10_000, None),
    (struct.pack("<Q", 16) + b'{"a": 1, "a": 2}', None),
    (struct.pack("<Q", 5000) + b"9" * 5000, None),
]


@pytest.mark.parametrize(("content", "says"), DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_and_foreign_files_are_refused_in_one_sentence(content, says, tmp_path):
    """The library refuses each of them, too, but for some that it reads as something else."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=says):
        w.Weights.open(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {}},
        {"weight_map": {"a": None, "b": "b.safetensors"}},
        {"weight_map": {"a": "../a.safetensors"}},
        {"weight_map": {"a": "a" * 5000}},
        {"weight_map": {"a": "folder.safetensors"}},
    ],
    ids=lambda index: str(index)[:40],
)
def test_an_index_that_leads_nowhere(index, tmp_path):
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel) as refused:
        w.Weights.open(tmp_path)
    assert len(str(refused.value)) < 400


def test_bf16_is_rounded_as_torch_rounds_it_and_nan_stays_nan():
    """Every pattern of the upper half with lower halves around the ties, NaNs and infinities among them."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper | lower).view(np.float32).ravel()
    ours = torch.from_numpy(w.from_float32(values, "BF16").view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).bfloat16()
    nan = torch.isnan(theirs)
    assert torch.equal(torch.isnan(ours), nan) and bool(nan.any())
    assert torch.equal(ours[~nan].view(torch.int16), theirs[~nan].view(torch.int16))


def test_a_missing_shard_is_named(tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(UnsupportedModel, match=r"\b1\b.*\b2\b.*model-2\.safetensors"):
        w.Weights.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    """Which of them is meant depends on the reader."""
    for number in (1, 2):
        save_file({"a": torch.ones(2) * number, f"b{number}": torch.ones(1)}, tmp_path / f"{number}.safetensors")
    places = {"a": "1.safetensors", "b1": "1.safetensors", "b2": "2.safetensors"}
    (tmp_path / w.INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UnsupportedModel, match=r"'a'.*\b1\.safetensors\b.*\b2\.safetensors\b"):
        w.Weights.open(tmp_path)


def test_a_full_disk_is_one_sentence(tmp_path):
    """/dev/full answers every write with ENOSPC, as a full disk does."""
    out = w.TensorOut("a", "F32", (4,), make=lambda: np.zeros(4, np.float32))
    (tmp_path / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(LeanSurgeonError, match="disk is full"):
        w.write(tmp_path, [out])


def test_an_output_that_the_system_refuses_is_one_sentence(tmp_path):
    """/proc takes no folders, and a file-size limit stops a write half-way."""
    for path, says in (("/proc/nowhere/out", "cannot be made"), (tmp_path / ("x" * 300), "File name too long")):
        with pytest.raises(LeanSurgeonError, match=says), output_folder(Path(path)):
            pass
    for error in (OSError(errno.EFBIG, "File too large"), RuntimeError("I/O error: File too large (os error 27)")):
        refused = pytest.raises(LeanSurgeonError, match=r"\bout\b.*File too large")
        with refused, output_folder(tmp_path / "out"):
            raise error
    with pytest.raises(FileNotFoundError), output_folder(tmp_path / "out"):
        (tmp_path / "another").read_text()  # not the output's fault
    assert not list(tmp_path.iterdir())


def test_force_deletes_no_folder_of_somebody_else(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.json").write_text("{}")
    with pytest.raises(LeanSurgeonError, match="will not delete"), output_folder(project, force=True):
        pass
    assert (project / "config.json").exists()


def test_an_output_folder_is_absent_or_complete(tmp_path):
    def write(name: str, text: str, **how: bool) -> None:
        with output_folder(tmp_path / name, **how) as aside:
            (aside / "surgery.json").write_text('{"source": {"name": "x"}, "files": ["surgery.json", "config.json"]}')
            (aside / "config.json").write_text(text)

    write("out", "{}")
    with pytest.raises(LeanSurgeonError, match="exists already"):
        write("out", "new")
    write("out", "new", force=True)
    assert (tmp_path / "out/config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out/thesis.txt").write_text("x")
    with pytest.raises(LeanSurgeonError, match=r"thesis\.txt"):
        write("out", "newer", force=True)
    (tmp_path / "project").mkdir()
    (tmp_path / "project/config.json").write_text("{}")
    with pytest.raises(LeanSurgeonError, match="will not delete"):
        write("project", "new", force=True)
