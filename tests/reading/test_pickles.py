"""Pickled weights: plain tensors are read as torch reads them, everything else is refused in one sentence."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest
import torch

from leansurgeon.errors import UnsupportedModel
from leansurgeon.reading import pickles

PLAIN = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).bfloat16(), "step": 7}


@pytest.mark.parametrize("wrap", [dict, collections.OrderedDict, lambda t: {"state_dict": t}, lambda t: {"model": t}])
def test_tensors_are_what_torch_reads(wrap, tmp_path):
    for new in (True, False):
        torch.save(wrap(PLAIN), tmp_path / "x.bin", _use_new_zipfile_serialization=new)
        found = pickles.read_tensors(tmp_path / "x.bin")
        assert found.keys() == {"a", "b"} and all(torch.equal(found[name], PLAIN[name]) for name in found)


def test_tied_tensors_get_memory_of_their_own(tmp_path):
    one = torch.ones(3)
    torch.save({"a": one, "b": one}, tmp_path / "x.bin")
    found = pickles.read_tensors(tmp_path / "x.bin")
    assert found["a"].data_ptr() != found["b"].data_ptr()


class Harm:
    def __reduce__(self):
        return print, ("harm",)


BAD = {
    "None": None,
    "a list": [torch.ones(2)],
    "foreign code": {"a": Harm()},
}


@pytest.mark.parametrize("value", BAD.values(), ids=list(BAD))
def test_what_holds_no_tensors_is_refused(value, tmp_path, capsys):
    torch.save(value, tmp_path / "x.bin")
    with pytest.raises(UnsupportedModel):
        pickles.read_tensors(tmp_path / "x.bin")
    assert capsys.readouterr().out == ""


def test_damaged_pickles_are_refused(tmp_path):
    torch.save(PLAIN, tmp_path / "x.bin")
    whole = (tmp_path / "x.bin").read_bytes()
    rng = np.random.default_rng(0)
    for number in range(60):
        cut = bytearray(whole[: rng.integers(1, len(whole))] if number % 2 else whole)
        for place in rng.integers(0, len(cut), 8):
            cut[place] = rng.integers(256)
        (tmp_path / "x.bin").write_bytes(cut)
        with contextlib.suppress(UnsupportedModel):
            pickles.read_tensors(tmp_path / "x.bin")
