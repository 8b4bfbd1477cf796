"""Presets against the paper's tables: exact integers, from the declaration alone and from the built model."""

import contextlib

import pytest
import timm
import torch

from leansurgeon import architectures
from leansurgeon.architectures.presets import PRESETS, get
from leansurgeon.checkpoints.model import initialise
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.paper import TABLES, audit

# preset, changes of the shape, parameters. Counted with upstream's own code (timm, cramming, mlpen/Nystromformer) or in
# closed form.
ROWS = [
    ("bert-crammed", {}, 119_589_889),
    ("bert-crammed", {"depth": 10, "heads": 24, "head_dim": 32}, 84_182_017),
    ("bert-crammed", {"depth": 10, "heads": 24, "head_dim": 64}, 107_774_977),
    ("gpt2-tinystories", {}, 89_160_785),
    ("gpt2-tinystories", {"depth": 4, "heads": 16, "head_dim": 32}, 64_150_609),
    ("gpt2-tinystories", {"depth": 4, "heads": 16, "head_dim": 42}, 65_461_329),
    ("gpt2-tinystories", {"depth": 4, "heads": 16, "head_dim": 64}, 68_344_913),
    ("vit-b", {}, 86_567_656),
    ("vit-b", {"depth": 7, "heads": 16, "mlp_dim": 1536}, 40_112_872),
    ("vit-b", {"depth": 7, "heads": 16, "head_dim": 48, "mlp_dim": 1536}, 34_602_472),
    ("deit-b", {}, 86_567_656),
    ("deit-b", {"depth": 7, "heads": 16, "mlp_dim": 1536}, 40_112_872),
    ("vit-l", {}, 203_614_184),
    ("vit-l", {"depth": 8, "heads": 30}, 98_597_864),
    ("vit-l", {"mlp_dim": 4096}, 304_326_632),
    ("vit-l", {"depth": 16, "mlp_dim": 4096}, 203_556_840),
    ("deit-l", {}, 203_614_184),
    ("deit-l", {"depth": 8, "heads": 30}, 98_597_864),
    ("lra/listops", {}, 209_802),
    ("lra/listops", {"depth": 1, "heads": 4}, 192_906),
    ("lra/listops", {"depth": 1, "heads": 4, "head_dim": 16}, 176_330),
    ("lra/text", {}, 370_562),
    ("lra/text", {"depth": 1, "heads": 4}, 353_666),
    ("lra/retrieval", {}, 395_138),
    ("lra/retrieval", {"depth": 1, "heads": 4}, 378_242),
    ("lra/retrieval", {"depth": 1, "heads": 6}, 394_818),
    ("lra/image", {}, 174_986),
    ("lra/image", {"depth": 1, "heads": 4}, 158_090),
    ("lra/image", {"depth": 1, "heads": 8}, 191_242),
    ("lra/pathfinder", {}, 173_954),
    ("lra/pathfinder", {"depth": 1, "heads": 4}, 157_058),
    ("lra/pathfinder", {"depth": 1, "heads": 8}, 190_210),
    ("digits-vit", {}, 302_154),
    ("digits-vit", {"depth": 3, "heads": 8, "mlp_dim": 128}, 152_394),
]


def redesigned(name, changes):
    """The family that can hold the new shape, and a config of it."""
    preset = get(name)
    architecture, config = architectures.load_families()[preset.family], preset.config
    kv = {"kv_heads": changes["heads"]} if "heads" in changes else {}
    shape = architecture.shape(config).with_(**changes, **kv)
    stage = shape.stages[0]
    if not architecture.stores_head_dim and stage.head_dim * stage.heads != stage.width:
        architecture = architectures.load_families()[architecture.decoupled]
        config["architecture"] = architecture.model_types[0]
    return architecture, architecture.with_shape(config, shape)


@pytest.mark.parametrize(("name", "changes", "expected"), ROWS)
def test_the_declaration_and_the_built_model_have_the_parameters(name, changes, expected):
    architecture, config = redesigned(name, changes)
    assert architecture.count(config).total == expected
    with torch.device("meta"):
        model = initialise(config, architecture, seed=0)
    assert sum(p.numel() for p in model.parameters()) == expected
    if architecture.name != "vit":  # transformers renames a ViT's tensors while loading; its own test compares the file
        built = {n: tuple(p.shape) for n, p in model.named_parameters()}
        assert built == {spec.name: spec.shape for spec in architecture.tensors(config)}
        for layer in range(architecture.shape(config).depth):
            assert model.get_submodule(architecture.prefixes[0] + architecture.projection.format(i=layer))


@pytest.mark.parametrize(("changes", "expected"), [({}, 209_942), ({"depth": 1, "heads": 4, "kv_heads": 4}, 193_046)])
def test_the_convolution_of_upstream_is_35_parameters_a_head_and_layer(changes, expected):
    preset = get("lra/listops")
    architecture = architectures.load_families()[preset.family]
    config = preset.config | {"conv_kernel_size": 35}
    shape = architecture.shape(config).with_(**changes)
    assert architecture.count(config, shape).total == expected


def test_every_preset_is_of_the_family_that_its_library_makes_of_it():
    """timm's own entry point says where a model is made, transformers' config which type it is."""
    for preset in PRESETS.values():
        if name := preset.config.get("architecture"):
            made_in = timm.model_entrypoint(name).__module__.removeprefix("timm.models.")
            made_in = {"vision_transformer": "vit", "deit": "vit"}.get(made_in, made_in)
            assert preset.family == f"timm_{made_in}"
        else:
            assert preset.family == preset.config["model_type"]


def test_policies_give_the_counts_that_the_paper_prints():
    """What `--head-dim auto` makes of a printed shape is nearer to its printed count than the other policy's."""
    told = set()
    for row in (row for exhibit in TABLES for row in exhibit.rows if row.printed.count):
        off, start = {}, audit.OriginalModel(row.preset)
        for policy in ("auto", "keep", "split"):
            with contextlib.suppress(LeanSurgeonError):
                count = audit.count(start, audit.target_of(start, row.words, policy), "formula")
                off[policy] = abs(count - row.printed.count)
        if len(set(off.values())) > 1:
            told.add(row.preset)
            assert off["auto"] == min(off.values()), (row, off)
    assert len(told) > 5, told


def test_an_unknown_preset_is_a_usage_error_with_a_suggestion():
    with pytest.raises(UsageError, match=r"'bert-crammed'"):
        get("bert-cramed")
