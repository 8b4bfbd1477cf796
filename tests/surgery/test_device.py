"""Calibrated surgery on a GPU that is pretended: the choices and tensors of the CPU, states where there is room."""

from contextlib import closing, nullcontext

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.commands.shrink import ShrinkRequest, shrink
from leansurgeon.errors import UsageError
from leansurgeon.measure import device
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.surgery import context, local_fit
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.context import CalibrationContext
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.support.methods import with_method
from tests.support.pretend_gpu import plugged_in
from tests.surgery.cuts import few_samples

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def decided(steps, samples: Calibration, device: str) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    """The layers that stay, and the tensors that were changed."""
    with closing(calibrate(steps, samples, device=device)) as outcome:
        return outcome.record.layers, {name: np.array(values) for name, values in outcome.edits.items()}


@pytest.mark.parametrize(
    ("family", "wanted", "method", "room"),
    [
        ("gpt2", {"layers": "2"}, Method(), 0.0),  # states are on the host
        ("vit", {"heads": "2", "mlp_dim": "40", "head_dim": "keep"}, Method(keep="0,1,3", heal="closed"), 0.3),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_gpu_chooses_and_makes_what_a_cpu_does(family, wanted, method, room, saved, monkeypatch):
    steps = plan(open_source(str(saved(family)[0])), RequestedShape(**wanted), 0, method, calibrated=True)
    samples = few_samples(family)
    layers, tensors = decided(steps, samples, "cpu")
    monkeypatch.setattr(context, "SHARE", room)
    with plugged_in(monkeypatch) as gpu:
        found = decided(steps, samples, "cuda:0")
    assert gpu.waits["to the gpu"] and found[0] == layers and found[1].keys() == tensors.keys() != set()
    for name, values in tensors.items():
        # A GPU takes the sums of a refit in fp32, a CPU in fp64.
        assert np.linalg.norm(found[1][name] - values) < 2e-3 * np.linalg.norm(values) + 1e-4, name


class Asked(Exception):
    """Raised with the device instead of a cut."""


@pytest.mark.parametrize(("asked", "taken"), [("auto", "cuda:0"), ("cpu", "cpu")])
def test_auto_takes_a_gpu_for_a_cut(asked, taken, saved, tmp_path, monkeypatch):
    def look(steps, calibration, say, device, state):
        raise Asked(device)

    monkeypatch.setattr("leansurgeon.surgery.calibrate.calibrate", look)
    said: list[str] = []
    with plugged_in(monkeypatch, count=3), pytest.raises(Asked, match=taken):
        shrink(ShrinkRequest(source=str(saved("vit")[0]), layers=2, out=tmp_path / "out", device=asked), said.append)
    assert any("on cuda:0" in line for line in said) is (asked == "auto")


@pytest.fixture
def steps(saved):
    """A cut of a llama that is wide enough for products in bf16."""
    folder, _ = saved("llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    return plan(open_source(str(folder)), RequestedShape(layers="2"), calibrated=True)


def test_states_rest_on_the_host_where_they_are_too_many(steps, monkeypatch):
    with plugged_in(monkeypatch):
        assert CalibrationContext(steps, few_samples("llama"), device="cuda:0").home == GPU
        monkeypatch.setattr(context, "SHARE", 1e-9)
        there = CalibrationContext(steps, few_samples("llama"), device="cuda:0")
        streams = context.SampleView.of(there.calibration, None).streams(there.teacher)["fit"]
        there.fill(0)
        assert there.home == CPU and {h.device for h in [*streams.hidden, *streams.run()]} == {CPU}
        assert streams.call(0, streams.hidden[0]).device == GPU


def test_products_in_bf16_where_they_agree(steps, monkeypatch):
    with plugged_in(monkeypatch):
        made = CalibrationContext(steps, few_samples("llama"), device="cuda:0")
        stream = context.SampleView.of(made.calibration, None).streams(made.teacher)["guard"]
        made.fill(0)
        plain = stream.run()[0].cpu()
        monkeypatch.setattr(context, "AGREES", 1.0)
        made.choose_products()
        made.fill(0)  # the comparison has emptied it
        rounded = stream.run()[0].cpu()
        error = float((plain - rounded).norm() / plain.norm())
        assert rounded.dtype == torch.float32 and 1e-5 < error < 0.05
        monkeypatch.setattr(context, "AGREES", 0.0)
        strict = CalibrationContext(steps, few_samples("llama"), device="cuda:0")
        strict.choose_products()
        assert strict.cast is nullcontext


def test_a_cut_in_bf16_is_refitted_as_in_fp32(steps, monkeypatch):
    """Whether a projection reaches the block's output in a straight line is not a question of rounding."""
    after = {}
    for narrow in (False, True):
        monkeypatch.setattr(local_fit, "has_bf16", lambda _, narrow=narrow: narrow)  # whatever this processor can
        monkeypatch.setattr(context, "AGREES", 1.0)
        with closing(calibrate(with_method(steps, keep=(0, 1)), few_samples("llama"))) as outcome:
            (made,) = outcome.record.decisions
            assert made.refit.down.kept and made.error_after < made.error_before
            after[narrow] = made.error_after
    assert after[True] != after[False] and abs(after[True] / after[False] - 1) < 0.05


def test_the_device_is_the_users(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto") == device.choose_device("cpu") == "cpu"
    for word in ("gpu", "cuda:", "cuda:x", "cuda:0", "cuda"):
        with pytest.raises(UsageError):
            device.choose_device(word)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device.choose_device(word) for word in ("auto", "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"]
    with pytest.raises(UsageError, match="cuda:0 to cuda:1"):
        device.choose_device("cuda:2")


def test_spans_follow_from_the_model_and_not_from_the_machine(saved, monkeypatch):
    """Five copies in fp32 of the blocks take no more than the weights do, or than `FITTED`."""
    source = open_source(str(saved("gpt2")[0]))
    steps = plan(source, RequestedShape(layers="3"), calibrated=True)
    block = sum(spec.size for spec in source.specs if spec.layer == 0)
    size = sum(4 * spec.size for spec in source.specs)
    for fitted in (context.FITTED, 0):
        monkeypatch.setattr(context, "FITTED", fitted)
        assert CalibrationContext(steps, few_samples("gpt2")).longest_span == max(fitted, size) // (20 * block)
    monkeypatch.setattr(CalibrationContext, "longest_span", 1)
    with closing(calibrate(with_method(steps, "local", (0, 1, 3)), few_samples("gpt2"))) as outcome:
        assert [len(cut.spans) for cut in outcome.record.healing.local.cuts] == [0]
