"""Programs that take the model as a graph or with other numbers: export, compile, ONNX Runtime, OpenVINO, torchao."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.clients.cells import kinds
from tests.clients.conftest import inputs_of, loaded, logits_of

pytestmark = pytest.mark.clients


class Logits(torch.nn.Module):
    """The model with tensors alone as inputs and outputs, as graph formats want it."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values):
        keep = {"use_cache": False} if "input_ids" in self.names and hasattr(self.model, "generate") else {}
        found = self.model(**dict(zip(self.names, values, strict=True)), **keep)
        return found if torch.is_tensor(found) else found.logits


def graph(cut, kind):
    """The wrapped model, its inputs, and what it answers."""
    model, inputs = loaded(cut(kind), kind), inputs_of(kind)
    return Logits(model, list(inputs)).eval(), inputs, logits_of(model, inputs)


@kinds("torch.export")
def test_torch_export(kind, cut):
    model, inputs, wanted = graph(cut, kind)
    program = torch.export.export(model, tuple(inputs.values()))
    assert torch.allclose(program.module()(*inputs.values()), wanted, atol=1e-5)


@kinds("torch.compile")
def test_torch_compile(kind, cut):
    model, inputs, wanted = graph(cut, kind)
    with torch.no_grad():
        found = torch.compile(model)(*inputs.values())
    assert torch.allclose(found, wanted, atol=1e-4)


@kinds("torchao int8")
def test_torchao_int8(kind, cut):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, inputs, wanted = graph(cut, kind)
    quantize_(model, Int8WeightOnlyConfig())
    with torch.no_grad():
        found = model(*inputs.values())
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.05


@kinds("ONNX Runtime")
def test_onnx_runtime(kind, cut, tmp_path):
    import onnxruntime

    model, inputs, wanted = graph(cut, kind)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, tuple(inputs.values()), str(file), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    values = [value.numpy() for value in inputs.values()]
    (found,) = session.run(None, dict(zip(names, values, strict=False)))
    assert np.allclose(found, wanted.numpy(), atol=1e-4)


@kinds("OpenVINO")
def test_openvino(kind, cut):
    import openvino

    model, inputs, wanted = graph(cut, kind)
    converted = openvino.convert_model(model, example_input=tuple(inputs.values()))
    compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled([value.numpy() for value in inputs.values()])[0]
    assert np.allclose(found, wanted.numpy(), atol=1e-3)
