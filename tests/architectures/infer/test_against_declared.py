"""What inference finds of the families that are declared by hand, held against the declarations: every tensor by its
name in the file, every axis in which heads or MLP units stand.
"""

import json

import pytest
import transformers
from safetensors.torch import load_file

from leansurgeon import architectures
from leansurgeon.architectures import infer
from leansurgeon.architectures.match import match
from leansurgeon.checkpoints.source import complete
from tests.conftest import FAMILIES

# What inference cannot hold against a declaration: a length of text that no small model keeps.
BEYOND = ("nystromformer",)


def words(axes: tuple[str, ...], plain: bool) -> list[str]:
    """Axes with heads or units in them as words, all others as nothing; plain attention has one kind of heads."""
    found = [a if any(w in a for w in ("q", "kv", "heads", "mlp")) else "" for a in axes]
    return [{"kv": "q"}.get(a, a) if plain else a for a in found]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in BEYOND])
def test_the_same_axes(family, tmp_path):
    config_class, model_class, numbers = FAMILIES[family]
    # T5 does not scale its scores: where weights are large, rounding grows beyond what a proof lets pass.
    numbers = numbers | ({"initializer_factor": 0.5} if "initializer_factor" in numbers else {})
    config = getattr(transformers, config_class)(**numbers)
    getattr(transformers, model_class)(config).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    by_hand, inferred = architectures.find_declared(config), infer.architecture(infer.complete_config(config))
    assert inferred.evidence and not by_hand.evidence
    theirs = {s.name: s for s in match(by_hand, complete(config), sizes)}
    ours = {s.name: s for s in match(inferred, infer.complete_config(config), sizes)}
    shape = by_hand.shape(config)
    assert inferred.shape(infer.complete_config(config)) == shape
    plain = all(stage.heads == stage.kv_heads for stage in shape.stages)
    seen = 0
    for name, spec in theirs.items():
        if spec.layer is None:
            continue
        assert ours[name].layer == spec.layer, name
        there, here = words(spec.axes, plain), words(ours[name].axes, plain)
        for a, b in zip(there, here, strict=True):
            refused = ("heads" if "mlp" not in a else "mlp_dim") in inferred.refused
            assert a == b or (refused and not b), (name, there, here, dict(inferred.refused))
            seen += bool(b)
    assert seen > 2 * shape.depth
    assert "depth" not in inferred.refused
