"""timm's families: declaration, modelling file and surgery against the models that timm itself builds."""

import importlib
import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from leansurgeon import architectures
from leansurgeon.architectures.infer.timm_models.arguments import constructor_arguments
from leansurgeon.architectures.timm_models import folder_config, list_arguments, skeleton, source_config
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.reshaped import within_block
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.surgery.doctor import examine
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.surgery.cuts import cut

SMALL = {"in_chans": 3, "num_classes": 5}
PLAIN = SMALL | dict(img_size=32, embed_dim=32, depth=4, num_heads=4, mlp_ratio=2)
FLAT, STAGED = ("7", "2", "8"), ("3,7,8,5", "1,2,2,1", "4,8,8,8")
# family: class in timm, name of a timm model, the constructor's arguments, heads and layers that are asked for, heads
# that split the width.
FAMILIES = {
    "vit": (
        "timm.models.vision_transformer.VisionTransformer",
        "vit_tiny_patch16_224",
        PLAIN | dict(patch_size=8),
        FLAT,
    ),
    "xcit": ("timm.models.xcit.Xcit", "xcit_nano_12_p16_224", PLAIN | dict(eta=0.7, tokens_norm=True), FLAT),
    "tnt": (
        "timm.models.tnt.TNT",
        "tnt_s_patch16_224",
        SMALL | dict(img_size=32, embed_dim=32, inner_dim=8, depth=4, num_heads_outer=4, mlp_ratio=2, qkv_bias=True),
        FLAT,
    ),
    "volo": (
        "timm.models.volo.VOLO",
        "volo_d1_224",
        SMALL
        | dict(img_size=32, stem_hidden_dim=8, layers=[2, 3, 4, 2], embed_dims=[16, 32, 32, 32], mlp_ratio=[3, 3, 3, 3])
        | dict(num_heads=[2, 4, 4, 4], qkv_bias=True),
        STAGED,
    ),
    "davit": (
        "timm.models.davit.DaVit",
        "davit_tiny",
        SMALL | dict(depths=[1, 2, 3, 1], embed_dims=[16, 32, 32, 32], num_heads=[2, 4, 4, 4], mlp_ratio=2),
        ("3,7,8,5", "1,1,2,1", "4,8,8,8"),
    ),
    "cait": ("timm.models.cait.Cait", "cait_xxs24_224", PLAIN | dict(patch_size=8, init_values=0.5), FLAT),
    "beit": (
        "timm.models.beit.Beit",
        "beit_base_patch16_224",
        PLAIN | dict(patch_size=8, init_values=0.5, use_abs_pos_emb=False, use_rel_pos_bias=True),
        FLAT,
    ),
    "eva": (
        "timm.models.eva.Eva",
        "eva02_tiny_patch14_224",
        PLAIN | dict(patch_size=8, swiglu_mlp=True, use_rot_pos_emb=True, ref_feat_shape=[4, 4]),
        FLAT,
    ),
    "swin": (
        "timm.models.swin_transformer.SwinTransformer",
        "swin_tiny_patch4_window7_224",
        SMALL
        | dict(img_size=32, patch_size=2, embed_dim=8, depths=[2, 2, 4, 2], num_heads=[2, 2, 4, 4], window_size=3)
        | dict(head_dim=[4, 8, 8, 16], mlp_ratio=[2, 2, 2, 2], drop_path_rate=0.0),
        ("3,5,6,5", "2,2,2,2", "4,8,8,8"),
    ),
}
NATIVE = ("swin",)  # timm's constructor takes head_dim
PROVED = "davit"  # with the proof in a fresh process, too; it takes seconds


def family_of(key):
    return architectures.load_families()[f"timm_{key}"]


def build(key, **changes):
    path, _, args, _ = FAMILIES[key]
    module, name = path.rsplit(".", 1)
    torch.manual_seed(0)
    return getattr(importlib.import_module(module), name)(**args | changes).eval()


def stir(model):
    """Weights and statistics that are nowhere zero or one, so that a mistake shows."""
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.add_(torch.rand_like(value) * 0.2)
    return model


def save_folder(folder, model, config):
    folder.mkdir()
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(key, **changes):
    return folder_config(family_of(key), FAMILIES[key][1], FAMILIES[key][2] | changes, {"input_size": (3, 32, 32)})


def save_small(key, folder, **changes):
    """A small model of a family, and its folder."""
    model = stir(build(key, **changes))
    return save_folder(folder, model, config_of(key, **changes)), model


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return request.param, *save_small(request.param, tmp_path_factory.mktemp(request.param) / "source")


def image(batch=2):
    torch.manual_seed(2)
    return torch.randn(batch, 3, 32, 32)


@torch.no_grad()
def output(model):
    return model.eval()(image())


def count(model):
    return sum(p.numel() for p in model.parameters())


def reload(folder):
    """As the model card says: import the modelling file, then timm's own way."""
    name = json.loads((folder / "config.json").read_text())["architecture"]
    if name.startswith("leansurgeon_"):
        importlib.import_module("leansurgeon.models.timm_" + name.removeprefix("leansurgeon_"))
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def test_every_tensor_of_timm_has_one_role(case):
    key, folder, model = case
    source = open_source(str(folder))
    assert {s.name: s.shape for s in source.specs} == {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert all(s.role not in ("head", "embedding") for s in source.specs if s.layer is not None)
    assert {s.name for s in source.specs if s.counted} == {n for n, _ in model.named_parameters()}
    assert source.parameters.total == count(model)
    assert torch.equal(output(load(folder).model), output(model))
    if key != "volo":  # timm's named models take no other stages
        told = list_arguments(source.architecture, constructor_arguments(type(model), *FAMILIES[key][1:3]))
        assert told.items() >= {k: v for k, v in FAMILIES[key][2].items() if k != "drop_path_rate"}.items()


def test_kept_head_dim_is_exact_and_reloads_through_timm(case, tmp_path):
    key, folder, model = case
    steps, record = cut(folder, tmp_path / "wide", check=key == PROVED, heads=FAMILIES[key][3][0], head_dim="keep")
    assert steps.exactness == "exact"
    assert steps.architecture.name == f"{'timm' if key in NATIVE else 'leansurgeon'}_{key}"
    if key == PROVED:
        assert record.proof.loaded_with == f"timm.create_model after `import leansurgeon.models.timm_{key}`"
    wide, old = reload(tmp_path / "wide"), model.state_dict()
    torch.testing.assert_close(output(wide), output(model), atol=1e-5, rtol=1e-5)
    grown = {name for name, value in wide.state_dict().items() if value.shape != old[name].shape}
    names = load(tmp_path / "wide").projections
    assert grown & {f"{name}.weight" for name in names}


def without_gradient(model):
    model.train()
    torch.nn.functional.cross_entropy(model(image(4)), torch.arange(4)).backward()
    return {n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()}


def test_wide_and_cut_trains_where_timms_own_model_does_and_survives_saving(case, tmp_path):
    key, folder, _ = case
    heads, layers, _ = FAMILIES[key][3]
    steps, _ = cut(folder, tmp_path / "lean", heads=heads, layers=layers, head_dim="keep", mlp_ratio=1.0)
    loaded = load(tmp_path / "lean")
    assert count(loaded.model) == steps.parameters_after.total
    assert without_gradient(loaded.model) <= without_gradient(stir(build(key)))
    stir(loaded.model)
    loaded.save(tmp_path / "again")
    assert torch.equal(output(reload(tmp_path / "again")), output(loaded.model))


def test_dropped_layers_are_whole_layers_of_the_source(case, tmp_path):
    key, folder, model = case
    steps, record = cut(folder, tmp_path / "short", check=key == PROVED, layers=FAMILIES[key][3][1])
    source, made = open_source(str(folder)), open_source(str(tmp_path / "short"))

    def place(spec, layers):
        return (None, spec.name) if spec.layer is None else (layers[spec.layer], within_block(spec, made.architecture))

    origins = {place(spec, range(source.shape.depth)): spec.name for spec in source.specs}
    old, new = model.state_dict(), load_file(tmp_path / "short/model.safetensors")
    assert new.keys() == {spec.name for spec in made.specs}
    for spec in made.specs:
        assert torch.equal(new[spec.name], old[origins[place(spec, steps.layers)]])
    # timm's own constructor holds fewer layers; only VOLO's named models refuse `layers`.
    assert steps.architecture.name == ("leansurgeon_volo" if key == "volo" else f"timm_{key}")
    reload(tmp_path / "short")
    if key == PROVED:
        assert record.proof.loaded_with == "timm.create_model"


def test_split_starts_queries_afresh_and_leaves_everything_else(case, tmp_path):
    key, folder, model = case
    steps, _ = cut(folder, tmp_path / "split", heads=FAMILIES[key][3][2], head_dim="split", init="fresh-attention")
    assert steps.exactness == "fresh"
    assert all(s.head_dim == s.width // s.heads for s in steps.after.stages)
    new, old = reload(tmp_path / "split").state_dict(), model.state_dict()
    changed = {n for n in new if new[n].shape != old[n].shape or not torch.equal(new[n], old[n])}
    roles = {s.role for s in open_source(str(folder)).specs if s.name in changed}
    assert changed and roles <= {"q", "k", "v", "qk", "qkv", "vkq", "head_param", "head_mix"}


def test_auto_keeps_head_dim_where_our_modelling_file_is_needed_anyway(case):
    key, folder, _ = case
    steps = plan(open_source(str(folder)), RequestedShape(heads="2x", init="fresh-attention"))
    assert steps.policy == ("keep" if key in ("xcit", "volo", "cait", "swin") else "split")
    assert (steps.architecture.modelling is None) == (key not in ("xcit", "volo", "cait"))


def test_heads_and_units_of_a_stage_are_trimmed_by_weight(tmp_path):
    """DaViT: each half of a block keeps its own strongest heads and units; stages that are not named stay."""
    model = stir(build("davit"))
    block = model.stages[2].blocks[0]
    with torch.no_grad():
        block[0].attn.proj.weight.view(32, 4, 8)[:, [0, 2]] *= 9
        block[1].attn.proj.weight.view(32, 4, 8)[:, [1, 3]] *= 9
        block[1].mlp.fc2.weight[:, 5:21] *= 9
    folder = save_folder(tmp_path / "source", model, config_of("davit"))
    asked = {"heads": "2,4,2,4", "layers": "1,2,1,1", "mlp_ratio": "2,2,0.5,2", "head_dim": "keep"}
    steps, record = cut(folder, tmp_path / "out", **asked)
    assert [o.name for o in steps.operators] == ["drop-layers", "trim-heads", "trim-mlp"]
    assert all(o.says.startswith("stage 3: ") for o in steps.operators)
    assert record.decided.kept_heads == {"3": (0, 2), "3.1": (1, 3)}
    new, old = reload(tmp_path / "out").state_dict(), model.state_dict()
    name = "stages.2.blocks.0.1.attn.qkv.weight"
    assert torch.equal(new[name], old[name].view(3, 4, 8, 32)[:, [1, 3]].reshape(48, 32))
    name = "stages.2.blocks.0.1.mlp.fc1.weight"
    assert torch.equal(new[name], old[name][5:21])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"heads": "4,8"}, r"--heads 4,8\b.*\b2 stages\b.*\b4\b"),
        ({"layers": "1,1,9,1"}, r"--layers 9\b.*\b3 layers\b"),
        ({"mlp_ratio": "2,x,2,2"}, r"mlp_ratio .*\bx\b.*\bnumber\b"),
        ({"heads": "3,4,4,4", "head_dim": "split"}, r"\b16\b.*\b3 heads\b.*\b2, 4\b"),
    ],
)
def test_wrong_lists_of_stages_are_refused(asked, words):
    source = open_source("davit-b", config_changes=FAMILIES["davit"][2])
    with pytest.raises(UsageError, match=words):
        plan(source, RequestedShape(**asked))


NAMES = {
    "vit_base_patch16_224.augreg_in1k": "timm_vit",
    "xcit_small_12_p8_224": "timm_xcit",
    "tnt_s_legacy_patch16_224": "timm_tnt",
    "volo_d1_224": "timm_volo",
    "davit_tiny": "timm_davit",
    "cait_xxs24_224": "timm_cait",
    "beitv2_base_patch16_224": "timm_beit",
    "eva02_small_patch14_336": "timm_eva",
    "swin_tiny_patch4_window7_224": "timm_swin",
}


@pytest.mark.parametrize(("name", "family"), NAMES.items())
def test_named_models_of_timm_are_read_to_the_last_tensor(name, family):
    source = open_source(f"timm/{name}", weights=False)
    assert source.architecture.name == family
    with torch.device("meta"):
        model = timm.create_model(name)
    assert source.parameters.total == count(model)
    assert {s.name: s.shape for s in source.specs} == {n: tuple(v.shape) for n, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("deit_tiny_distilled_patch16_224", "vit"),  # a token more
        ("deit3_small_patch16_224", "vit"),  # LayerScale
        ("vit_tiny_r_s16_p8_224", "vit"),  # a ResNet before the blocks
        ("vit_small_patch16_18x2_224", "vit"),  # blocks without one attention
        ("vit_pwee_patch16_reg1_gap_256", "vit"),
        ("resnet18", "vit"),
        ("davit_base_fl", "davit"),
        ("eva_large_patch14_196", "eva"),
    ],
)
def test_variants_that_are_not_declared_are_left_to_inference(name, family):
    """They are inferred (`architectures/infer/test_timm.py`)."""
    assert source_config(family_of(family), name, skeleton(name)) is None


def test_swin_v2_loses_layers_in_pairs_and_its_heads_can_be_split_only(tmp_path):
    args = SMALL | dict(img_size=32, patch_size=2, embed_dim=8, depths=[2, 2, 4, 2], num_heads=[2, 2, 4, 4])
    args |= dict(window_size=4, mlp_ratio=2)
    model = stir(timm.create_model("swinv2_tiny_window8_256", **args))
    config = source_config(family_of("swin_v2"), "swinv2_tiny_window8_256", model, args)
    folder = save_folder(tmp_path / "source", model, config)
    assert [c.says for c in examine(open_source(str(folder))) if c.ok is False] == []
    steps, _ = cut(folder, tmp_path / "cut", layers="2,2,2,2")
    assert steps.layers[4:6] == (4, 5)
    model.layers[2].blocks = model.layers[2].blocks[:2]
    torch.testing.assert_close(output(reload(tmp_path / "cut")), output(model), atol=1e-5, rtol=1e-5)
    cut(folder, tmp_path / "split", heads="4,4,8,8", init="fresh-attention")
    assert reload(tmp_path / "split").layers[2].blocks[0].attn.num_heads == 8
    with pytest.raises(UnsupportedModel, match="timm_swin_v2 derives head_dim"):
        cut(folder, tmp_path / "wide", heads="2x", head_dim="keep")
