"""Bad input and bad moments: damaged weights, strange files, and a SIGKILL at any point of the writing."""

import os
import signal
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from leansurgeon.checkpoints import weights
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.publish import durable, output
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import Diverged, LeanSurgeonError, UnsupportedModel
from leansurgeon.surgery import shrink
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out, decide
from tests import conftest
from tests.support.processes.forks import forked
from tests.surgery.cuts import cut


def spoil(folder, change):
    """Change the tensors of a folder in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# -- weights ---------------------------------------------------------------------------------------

GATE = "model.layers.2.mlp.gate_proj.weight"


def stumble(*_, **__):
    raise Diverged("The activations behind layer 2 hold NaN or infinity.")


def test_nan_weights_are_named(saved, tmp_path, monkeypatch):
    """Whether calibration or the proof meets them first; and a sound source is not blamed."""
    folder, _ = saved("llama")
    monkeypatch.setattr(shrink, "prove", stumble)
    with pytest.raises(Diverged, match="behind layer 2"):
        cut(folder, tmp_path / "out", check=True, layers="2")
    spoil(folder, lambda tensors: tensors[GATE][3].fill_(float("nan")))
    with pytest.raises(Diverged, match=rf"'{GATE}'.*\bNaN\b"):
        cut(folder, tmp_path / "out", check=True, layers="2")
    monkeypatch.setattr("leansurgeon.surgery.calibrate.calibrate", stumble)
    steps = plan(open_source(str(folder)), RequestedShape(layers="2"), calibrated=True)
    with pytest.raises(Diverged, match=rf"'{GATE}'.*\bNaN\b"):
        decide(steps, type("Data", (), {"says": "text", "beside": None}))
    assert not (tmp_path / "out").exists()


def test_uneven_layers_are_refused_with_both_sizes(saved, tmp_path):
    folder, _ = saved("llama")
    spoil(folder, lambda t: t.update({GATE: t[GATE][:40].clone()}))
    with pytest.raises(UnsupportedModel, match=r"gate_proj\.weight.*\b40\b.*\b32\b.*\b48\b.*\b32\b"):
        open_source(str(folder))
    with pytest.raises(UnsupportedModel, match="lack"):
        spoil(folder, lambda t: t.pop(GATE))
        open_source(str(folder))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_quantised_model_whose_config_does_not_say_so(dtype, saved):
    folder, _ = saved("llama")
    spoil(folder, lambda t: t.update({GATE: (t[GATE] * 100).to(getattr(torch, dtype))}))
    with pytest.raises(UnsupportedModel, match=rf"'{GATE}'.*\b{dtype.upper()[0]}\d+\b.*\bquantised\b"):
        open_source(str(folder))


def test_a_shared_tensor_that_is_stored_twice_stays_shared(tmp_path):
    """transformers stores tied tensors once; other programs store both."""
    model = conftest.build("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "source")
    spoil(tmp_path / "source", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    steps, _ = cut(tmp_path / "source", tmp_path / "out", layers="2")
    assert steps.parameters_before.total == sum(p.numel() for p in model.parameters())
    lean = load(tmp_path / "out").model
    assert lean.lm_head.weight is lean.model.embed_tokens.weight
    assert torch.equal(lean.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float64"])
def test_other_dtypes_pass_through_bit_for_bit(dtype, saved, tmp_path):
    folder, _ = saved("llama")
    kind = getattr(torch, dtype)
    spoil(folder, lambda t: t.update({k: v.to(kind) for k, v in t.items()}))
    source = load_file(folder / "model.safetensors")
    cut(folder, tmp_path / "short", layers="2")
    short = load_file(tmp_path / "short/model.safetensors")
    assert {t.dtype for t in short.values()} == {kind}
    for name, tensor in short.items():
        old = source[name.replace("layers.1.", "layers.3.")]  # both ends stay
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8)), name
    if "float8" in dtype:  # new values have no place in fp8
        with pytest.raises(UnsupportedModel, match=r"\bwritten in F8"):
            cut(folder, tmp_path / "wide", heads="8")
        cut(folder, tmp_path / "split", Method(more="split"), heads="8")  # copies and zeros have
        with pytest.raises(UnsupportedModel, match=r"\bin F8.*\bcopied\b"):
            cut(folder, tmp_path / "narrow", mlp_dim="24")  # which units stay is a matter of their size
    else:
        cut(folder, tmp_path / "wide", heads="8")
        wide = load_file(tmp_path / "wide/model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
        assert wide.dtype == kind and int((wide == 0).all(0).sum()) == 64


# -- SIGKILL ---------------------------------------------------------------------------------------

MOMENTS = [
    (weights, "copy_range", 0),
    (weights, "write_array", 7),
    (durable, "sync", 1),
    (output, "publish", 0),
    (durable.shutil, "rmtree", 0),
]


def killed_at(module: ModuleType, name: str, left: int, work: Callable[[], object]) -> None:
    """Do `work`, and be killed where it calls this function after `left` calls."""
    real = getattr(module, name)

    def deadly(*arguments, **options):
        nonlocal left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*arguments, **options)

    setattr(module, name, deadly)
    work()


@pytest.mark.parametrize("there", [False, True], ids=["new", "over an old one"])
def test_sigkill_leaves_the_folder_absent_or_complete(there, saved, tmp_path):
    folder, _ = saved("vit")
    out = tmp_path / "out"
    cut(folder, tmp_path / "whole", heads="8")
    whole = load_file(tmp_path / "whole/model.safetensors")
    steps = plan(open_source(str(folder)), RequestedShape(heads="8"))
    again = partial(carry_out, DecidedCut(steps), out, force=True, check=False)
    for module, name, left in MOMENTS:
        if there and not out.exists():
            cut(folder, out, layers="2")
        done = forked(partial(killed_at, module, name, left, again), tmp_path)
        assert done.returncode == -signal.SIGKILL, done.stderr
        if out.exists():  # the old one, or the new one whole
            depth = open_source(str(out)).shape.depth
            assert (load_file(out / "model.safetensors").keys() == whole.keys()) == (depth == 4)
            assert (out / "surgery.json").exists() and (out / "README.md").exists()
        else:
            assert name in ("publish", "rmtree") or not there
    with pytest.raises(LeanSurgeonError):  # it is there already
        cut(folder, tmp_path / "whole", heads="8")
