"""Our safetensors reader and writer against the safetensors library, and against damaged files."""

from __future__ import annotations

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
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel


@pytest.fixture
def file(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.arange(4),
        "empty": torch.zeros(0, 2),
        "d": torch.randn(2, 2, 2, generator=generator).half(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensors


def test_reads_what_the_library_wrote(file):
    path, tensors = file
    opened = w.Weights.open(path.parent)
    assert opened.shapes == {k: tuple(v.shape) for k, v in tensors.items()}
    for name in ("a", "b", "d"):
        assert np.array_equal(opened.float32(name), tensors[name].float().numpy())


def test_the_library_reads_what_we_wrote(file, tmp_path):
    path, tensors = file
    opened = w.Weights.open(path.parent)
    outs = [w.TensorOut(n, e.dtype, e.shape, entry=e) for n, e in opened.entries.items()]
    drawn = np.random.default_rng(0).standard_normal((4, 3), dtype=np.float32)
    outs.append(w.TensorOut("new", "BF16", (4, 3), make=lambda: w.from_float32(drawn, "BF16")))
    (tmp_path / "out").mkdir()
    w.write(tmp_path / "out", outs)
    back = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)
    assert torch.equal(back["new"], torch.from_numpy(drawn).bfloat16())


def test_shards_and_index_are_what_transformers_expects(file, tmp_path):
    path, tensors = file
    opened = w.Weights.open(path.parent)
    (tmp_path / "out").mkdir()
    files = w.write(
        tmp_path / "out", [w.TensorOut(n, e.dtype, e.shape, entry=e) for n, e in opened.entries.items()], shard_bytes=70
    )
    assert len(files) > 1
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "out" / shard, "pt") as handle:
            assert torch.equal(handle.get_tensor(name), tensors[name])
    assert w.Weights.open(tmp_path / "out").shapes == opened.shapes


def header(entries: dict, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has 0 bytes"),
        (b"\x80\x02}q\x00(X\x06\x00\x00\x00weight", r"header\b.*\d"),
        (struct.pack("<Q", 8) + b"notjson!", "JSON"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "truncated"),
        (header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"), "damaged"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"), "damaged"),
        (header({"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 1]}}, b"1"), "dtype 'Q4'"),
        (header({"a": {"dtype": "F32", "shape": [1]}}), "damaged"),
        (header({"a": 3}), "damaged"),
        (header([1, 2]), r"header\b.*\blist\b"),
    ],
)
def test_damaged_and_foreign_files_are_refused_in_one_sentence(content, says, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=says):
        w.Weights.open(tmp_path)


@pytest.mark.parametrize(
    ("item", "extra"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b"behind"),
        ({"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}, b""),
        ({"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}, b""),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, b""),
        ({"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]}, b""),
        ({"dtype": "F32", "shape": [2**47, 2**47], "data_offsets": [0, 8]}, b""),
        ({"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]}, b""),
        ({"dtype": "F32", "shape": [2], "data_offsets": []}, b""),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}, b""),
        ({"dtype": "F32", "shape": [2], "data_offsets": ["0", 8]}, b""),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, b""),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, b""),
        ({"dtype": "F32", "shape": {}, "data_offsets": [0, 8]}, b""),
        ([], b""),
    ],
    ids=str,
)
def test_entries_that_the_format_forbids(item, extra, tmp_path):
    """The library refuses each of them, too, but for some that it reads as something else."""
    (tmp_path / "model.safetensors").write_bytes(header({"a": item}, bytes(8) + extra))
    with pytest.raises(UnsupportedModel):
        w.Weights.open(tmp_path)


@pytest.mark.parametrize("start", ["[" * 10_000, '{"a": 1, "a": 2}', "9" * 5000, '{"\\ud800": 1}'])
def test_headers_that_json_itself_forbids_or_that_nothing_holds(start, tmp_path):
    content = start.encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
    with pytest.raises(UnsupportedModel):
        w.Weights.open(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {},
        {"weight_map": []},
        {"weight_map": {}},
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": None, "b": "b.safetensors"}},
        {"weight_map": {"a": "../a.safetensors"}},
        {"weight_map": {"a": "a\0.safetensors"}},
        {"weight_map": {"a": "a" * 5000}},
        {"weight_map": {"a": ".."}},
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


def test_a_copy_without_copy_file_range_is_the_same(file, tmp_path, monkeypatch):
    path, tensors = file

    def refuses(*args):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(w.os, "copy_file_range", refuses)
    opened = w.Weights.open(path.parent)
    (tmp_path / "out").mkdir()
    w.write(tmp_path / "out", [w.TensorOut(n, e.dtype, e.shape, entry=e) for n, e in opened.entries.items()])
    back = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)


def test_a_full_disk_is_one_sentence(tmp_path):
    """/dev/full answers every write with ENOSPC, as a full disk does."""
    out = w.TensorOut("a", "F32", (4,), make=lambda: np.zeros(4, np.float32))
    (tmp_path / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(LeanSurgeonError, match="disk is full"):
        w.write(tmp_path, [out])


def test_an_output_that_the_system_refuses_is_one_sentence(tmp_path):
    """/proc takes no folders, and a file-size limit stops a write half-way."""
    from leansurgeon.checkpoints.publish.output import output_folder

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


def test_an_output_folder_is_absent_or_complete(tmp_path):
    from leansurgeon.checkpoints.publish.output import output_folder

    with pytest.raises(RuntimeError), output_folder(tmp_path / "out") as aside:
        (aside / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with output_folder(tmp_path / "out") as aside:
        (aside / "surgery.json").write_text('{"source": {"name": "x"}, "files": ["surgery.json", "config.json"]}')
        (aside / "config.json").write_text("{}")
    with pytest.raises(LeanSurgeonError, match="exists already"), output_folder(tmp_path / "out"):
        pass
    with output_folder(tmp_path / "out", force=True) as aside:
        (aside / "surgery.json").write_text('{"source": {"name": "x"}, "files": ["surgery.json", "config.json"]}')
        (aside / "config.json").write_text("new")
    assert (tmp_path / "out/config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out/thesis.txt").write_text("x")
    with (
        pytest.raises(LeanSurgeonError, match=r"thesis\.txt"),
        output_folder(tmp_path / "out", force=True),
    ):
        pass
    (tmp_path / "project").mkdir()
    (tmp_path / "project/config.json").write_text("{}")
    with pytest.raises(LeanSurgeonError, match="will not delete"), output_folder(tmp_path / "project", force=True):
        pass
