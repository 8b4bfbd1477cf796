"""Presets of timm's families against the paper's tables: exact integers, torch-free and on the meta device."""

import pytest
import torch

from leansurgeon import architectures
from leansurgeon.architectures.presets import PRESETS
from leansurgeon.checkpoints.model import initialise
from leansurgeon.checkpoints.source import open_source, timm_config
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape

VOLO = {"layers": "4,4,8,2", "heads": "16,32,32,32"}
# preset, what is asked for, parameters as counted with timm's own classes.
ROWS = [
    ("xcit-m", {}, 84_395_752),
    ("xcit-m", {"layers": "12", "heads": "16"}, 59_002_600),
    ("xcit-m", {"layers": "12", "heads": "16", "head_dim": "split"}, 46_401_256),
    ("xcit-l", {}, 189_096_136),
    ("xcit-l", {"layers": "12", "heads": "24"}, 103_792_744),
    ("tnt-b", {}, 65_428_680),
    ("tnt-b", {"layers": "8", "heads": "16", "mlp_dim": "1280"}, 30_897_800),
    ("volo-d3", {}, 86_325_072),
    ("volo-d3", VOLO, 47_454_032),
    ("volo-d3", {"mlp_ratio": 4.0}, 103_119_696 - 2 * 2 * 512 * 512 - 2 * 512),
    ("volo-d4", {}, 192_961_520),
    ("volo-d4", {"layers": "4,4,8,2", "heads": "24,32,32,32"}, 105_556_976),
    ("davit-b", {}, 87_954_408),
    ("davit-b", {"layers": "1,1,5,1", "heads": "4,8,32,32"}, 62_653_416),
    ("davit-l", {}, 196_811_752),
    ("davit-l", {"layers": "1,1,5,1", "heads": "6,12,48,48"}, 139_985_896),
]
# Rounded in the facts: millions.
ROUNDED = [
    ("xcit-l", {"layers": "12", "heads": "24", "head_dim": "keep"}, 117.96),
    ("tnt-b", {"layers": "8", "heads": "16"}, 44.02),
    ("tnt-b", {"layers": "8", "heads": "16", "head_dim": "keep"}, 51.88),
    ("tnt-b", {"layers": "8", "heads": "16", "head_dim": "keep", "mlp_dim": "1280"}, 38.76),
    ("davit-b", {"layers": "1,1,5,1", "heads": "4,8,32,32", "head_dim": "keep"}, 73.15),
    ("davit-l", {"layers": "1,1,5,1", "heads": "6,12,48,48", "head_dim": "keep"}, 163.60),
]


def redesigned(name, asked):
    source = open_source(name)
    steps = plan(source, RequestedShape(**asked))
    return steps, steps.target.config(steps.layers)


@pytest.mark.parametrize(("name", "asked", "expected"), ROWS)
def test_exact_integers_by_declaration_and_on_the_meta_device(name, asked, expected):
    steps, config = redesigned(name, asked)
    assert steps.parameters_after.total == steps.architecture.count(config).total == expected
    with torch.device("meta"):
        model = initialise(config, steps.architecture, seed=0)
    assert sum(p.numel() for p in model.parameters()) == expected
    declared = {spec.name: spec.shape for spec in steps.architecture.tensors(config)}
    assert declared == {n: tuple(v.shape) for n, v in model.state_dict().items()}


@pytest.mark.parametrize(("name", "asked", "millions"), ROUNDED)
def test_the_other_policy_gives_what_the_facts_say(name, asked, millions):
    steps, _ = redesigned(name, asked)
    assert round(steps.parameters_after.total / 1e6, 2) == pytest.approx(millions, abs=0.006)


@pytest.mark.parametrize("name", ["xcit-m", "tnt-b", "volo-d3", "davit-b"])
def test_presets_hold_timms_own_figures(name):
    """Every argument of a preset, and the model that it gives, are those of the timm model that it names."""
    preset = PRESETS[name]
    config = timm_config(preset.config["architecture"])
    assert config == preset.config
    assert architectures.of(config).name == preset.family


def test_shapes_of_stages_are_typed_as_lists():
    steps, _ = redesigned("volo-d3", VOLO)
    columns = [steps.after.column(name) for name in ("depth", "heads", "head_dim")]
    assert columns == ["4,4,8,2", "16,32,32,32", "16,16,16,16"]
    assert steps.layers == (0, 2, 5, 7, 8, 10, 13, 15, 16, 18, 20, 22, 25, 27, 29, 31, 32, 35)
