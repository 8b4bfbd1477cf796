"""timm's families besides ViT: declaration, modelling file and surgery against the models that timm itself builds."""

from __future__ import annotations

import importlib
import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from leansurgeon import architectures
from leansurgeon.architectures.timm_models import folder_config, list_arguments, skeleton, source_config
from leansurgeon.checkpoints.model import initialise, load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.kappa.blocks import measure_blocks
from leansurgeon.surgery.doctor import examine
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out

SMALL = {"in_chans": 3, "num_classes": 5}
# family: class in timm, name of a timm model, the constructor's arguments, heads and layers that are asked for, heads
# that split the width.
FAMILIES = {
    "xcit": (
        "timm.models.xcit.Xcit",
        "xcit_nano_12_p16_224",
        SMALL | dict(img_size=32, embed_dim=32, depth=4, num_heads=4, mlp_ratio=2, eta=0.7, tokens_norm=True),
        ("7", "2", "8"),
    ),
    "tnt": (
        "timm.models.tnt.TNT",
        "tnt_s_patch16_224",
        SMALL | dict(img_size=32, embed_dim=32, inner_dim=8, depth=4, num_heads_outer=4, mlp_ratio=2, qkv_bias=True),
        ("7", "2", "8"),
    ),
    "volo": (
        "timm.models.volo.VOLO",
        "volo_d1_224",
        SMALL
        | dict(img_size=32, stem_hidden_dim=8, layers=[2, 3, 4, 2], embed_dims=[16, 32, 32, 32], mlp_ratio=[3, 3, 3, 3])
        | dict(num_heads=[2, 4, 4, 4], qkv_bias=True),
        ("3,7,8,5", "1,2,2,1", "4,8,8,8"),
    ),
    "davit": (
        "timm.models.davit.DaVit",
        "davit_tiny",
        SMALL | dict(depths=[1, 2, 3, 1], embed_dims=[16, 32, 32, 32], num_heads=[2, 4, 4, 4], mlp_ratio=2),
        ("3,7,8,5", "1,1,2,1", "4,8,8,8"),
    ),
    "cait": (
        "timm.models.cait.Cait",
        "cait_xxs24_224",
        SMALL | dict(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4, mlp_ratio=2, init_values=0.5),
        ("7", "2", "8"),
    ),
    "beit": (
        "timm.models.beit.Beit",
        "beit_base_patch16_224",
        SMALL
        | dict(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4, mlp_ratio=2, init_values=0.5)
        | dict(use_abs_pos_emb=False, use_rel_pos_bias=True),
        ("7", "2", "8"),
    ),
    "eva": (
        "timm.models.eva.Eva",
        "eva02_tiny_patch14_224",
        SMALL
        | dict(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4, mlp_ratio=2, swiglu_mlp=True)
        | dict(use_rot_pos_emb=True, ref_feat_shape=[4, 4]),
        ("7", "2", "8"),
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
PROVED = ("volo", "davit")  # with the proof in a fresh process, too; it takes seconds


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


def save_folder(key, folder, model=None):
    """A model folder of a small model of this family."""
    folder.mkdir()
    state = (model or stir(build(key))).state_dict()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder_config(family_of(key), FAMILIES[key][1], FAMILIES[key][2], {"input_size": (3, 32, 32)})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=FAMILIES)
def case(request, tmp_path):
    key = request.param
    model = stir(build(key))
    return key, save_folder(key, tmp_path / "source", model), model


def image(batch=2):
    torch.manual_seed(2)
    return torch.randn(batch, 3, 32, 32)


def output(model, x=None):
    with torch.no_grad():
        return model.eval()(image() if x is None else x)


def cut(folder, out, *, check=False, **wanted):
    source = open_source(str(folder))
    steps = plan(source, RequestedShape(**wanted))
    return steps, carry_out(DecidedCut(steps), out, check=check)


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
    parameters = {n for n, _ in model.named_parameters()}
    assert {s.name for s in source.specs if s.counted} == parameters
    assert source.parameters.total == sum(p.numel() for p in model.parameters())
    if key != "volo":  # timm's named models take no other stages
        told = list_arguments(source.architecture, FAMILIES[key][1], model, FAMILIES[key][2])
        assert told.items() >= {k: v for k, v in FAMILIES[key][2].items() if k != "drop_path_rate"}.items()


def test_the_source_itself_loads_and_kappa_measures_every_attention(case):
    key, folder, model = case
    loaded = load(folder)
    assert torch.equal(output(loaded.model), output(model))
    stages = loaded.architecture.shape(loaded.config).stages
    attentions = 2 if key == "davit" else 1
    found = measure_blocks(loaded, [{"pixel_values": image()}], lambda batch: None, 2)["layers"]
    assert len(found) == attentions * sum(stage.depth for stage in stages)
    for name, layer in zip(loaded.projections, found, strict=True):
        assert 0 < layer["k"] <= dict(loaded.model.named_modules())[name].in_features


@pytest.mark.parametrize("key", [key for key in FAMILIES if key not in NATIVE])
def test_our_entry_point_without_head_dim_is_timms_model(key):
    importlib.import_module(f"leansurgeon.models.timm_{key}")
    torch.manual_seed(0)
    ours = timm.create_model(f"leansurgeon_{key}", **FAMILIES[key][2]).eval()
    theirs = build(key)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    assert torch.equal(output(ours), output(theirs))


def test_kept_head_dim_is_exact_and_reloads_through_timm(case, tmp_path):
    key, folder, model = case
    steps, record = cut(folder, tmp_path / "wide", check=key in PROVED, heads=FAMILIES[key][3][0], head_dim="keep")
    native = key in NATIVE
    assert steps.exactness == "exact" and steps.architecture.name == f"{'timm' if native else 'leansurgeon'}_{key}"
    if key in PROVED:
        after = "" if native else f" after `import leansurgeon.models.timm_{key}`"
        assert record.proof.loaded_with == f"timm.create_model{after}"
    wide = reload(tmp_path / "wide")
    torch.testing.assert_close(output(wide), output(model), atol=1e-5, rtol=1e-5)
    # The layers compute the same sum with wider attention, and what is new is drawn, not zero.
    old, new = model.state_dict(), wide.state_dict()
    grown = [n for n in new if new[n].shape != old[n].shape]
    assert grown and all(new[n].numel() > old[n].numel() for n in grown)
    loaded = load(tmp_path / "wide")
    assert sum(s.depth for s in steps.after.stages) <= len(loaded.projections)
    modules = dict(loaded.model.named_modules())
    assert all(f"{n}.weight" in grown for n in loaded.projections if modules[n].in_features != modules[n].out_features)


def test_wide_and_cut_has_a_gradient_wherever_timms_own_model_has_one(case, tmp_path):
    key, folder, _ = case
    heads, layers, _ = FAMILIES[key][3]
    steps, _ = cut(folder, tmp_path / "lean", heads=heads, layers=layers, head_dim="keep", mlp_ratio=1.0)
    lean = reload(tmp_path / "lean")
    assert sum(p.numel() for p in lean.parameters()) == steps.parameters_after.total
    assert without_gradient(lean) <= without_gradient(stir(build(key)))


def without_gradient(model):
    model.train()
    torch.nn.functional.cross_entropy(model(image(4)), torch.arange(4)).backward()
    return {n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()}


def test_a_trained_copy_saves_and_reloads_bit_for_bit(case, tmp_path):
    key, folder, _ = case
    heads, layers, _ = FAMILIES[key][3]
    cut(folder, tmp_path / "lean", heads=heads, layers=layers, head_dim="keep")
    loaded = load(tmp_path / "lean")
    stir(loaded.model)
    loaded.save(tmp_path / "again")
    assert torch.equal(output(reload(tmp_path / "again")), output(loaded.model))


def test_dropped_layers_are_whole_layers_of_the_source(case, tmp_path):
    key, folder, model = case
    _, layers, _ = FAMILIES[key][3]
    steps, record = cut(folder, tmp_path / "short", check=key == "davit", layers=layers)  # by timm alone
    old, new = model.state_dict(), load_file(tmp_path / "short/model.safetensors")
    source = open_source(str(folder))
    family = source.architecture
    kept = {}
    for spec in source.specs:
        if spec.layer is None:
            kept[spec.name] = spec.name
        elif spec.layer in steps.layers:
            at = [i for i in steps.layers if stage_of(source, i) == spec.stage].index(spec.layer)
            pattern = family.blocks(spec.stage).layer
            kept[spec.name.replace(pattern.format(i=spec.index), pattern.format(i=at), 1)] = spec.name
    assert set(kept) == set(new)
    assert all(torch.equal(new[name], old[came]) for name, came in kept.items())
    # timm's own constructor holds fewer layers; only VOLO's named models refuse `layers`.
    assert steps.architecture.name == ("leansurgeon_volo" if key == "volo" else f"timm_{key}")
    reload(tmp_path / "short")
    if key == "davit":
        assert record.proof.loaded_with == "timm.create_model"


def stage_of(source, layer):
    return next(s.stage for s in source.specs if s.layer == layer)


def test_split_starts_queries_afresh_and_leaves_everything_else(case, tmp_path):
    key, folder, model = case
    steps, _ = cut(folder, tmp_path / "split", heads=FAMILIES[key][3][2], head_dim="split", init="fresh-attention")
    assert steps.exactness == "fresh"
    assert all(s.head_dim == s.width // s.heads for s in steps.after.stages)
    new, old = reload(tmp_path / "split").state_dict(), model.state_dict()
    changed = {n for n in new if new[n].shape != old[n].shape or not torch.equal(new[n], old[n])}
    roles = {s.role for s in open_source(str(folder)).specs if s.name in changed}
    assert changed and roles <= {"q", "k", "v", "qk", "qkv", "vkq", "head_param", "head_mix"}


def test_heads_and_units_of_a_stage_are_trimmed_by_weight(tmp_path):
    """DaViT: each half of a block keeps its own strongest heads and units; stages that are not named stay."""
    model = stir(build("davit"))
    block = model.stages[2].blocks[0]
    with torch.no_grad():
        block[0].attn.proj.weight.view(32, 4, 8)[:, [0, 2]] *= 9
        block[1].attn.proj.weight.view(32, 4, 8)[:, [1, 3]] *= 9
        block[1].mlp.fc2.weight[:, 5:21] *= 9
    config = folder_config(family_of("davit"), "davit_tiny", FAMILIES["davit"][2], {"input_size": (3, 32, 32)})
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    asked = {"heads": "2,4,2,4", "layers": "1,2,1,1", "mlp_ratio": "2,2,0.5,2", "head_dim": "keep"}
    steps, record = cut(folder, tmp_path / "out", **asked)
    assert [o.name for o in steps.operators] == ["drop-layers", "trim-heads", "trim-mlp"]
    assert all(o.says.startswith("stage 3: ") for o in steps.operators)
    assert record.decided.kept_heads == {"3": (0, 2), "3.1": (1, 3)}
    new, old = load_file(tmp_path / "out/model.safetensors"), model.state_dict()
    halves = old["stages.2.blocks.0.1.attn.qkv.weight"].view(3, 4, 8, 32)[:, [1, 3]].reshape(48, 32)
    assert torch.equal(new["stages.2.blocks.0.1.attn.qkv.weight"], halves)
    assert torch.equal(new["stages.2.blocks.0.1.mlp.fc1.weight"], old["stages.2.blocks.0.1.mlp.fc1.weight"][5:21])
    assert torch.equal(new["stages.3.blocks.0.0.attn.qkv.weight"], old["stages.3.blocks.0.0.attn.qkv.weight"])
    assert torch.isfinite(output(reload(tmp_path / "out"))).all()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"heads": "4,8"}, r"--heads 4,8\b.*\b2 stages\b.*\b4\b"),
        ({"layers": "1,1,9,1"}, r"--layers 9\b.*\b3 layers\b"),
        ({"mlp_ratio": "2,2"}, r"mlp_ratio 2,2\b.*\b2 stages\b.*\b4\b"),
        ({"mlp_ratio": "2,x,2,2"}, r"mlp_ratio .*\bx\b.*\bnumber\b"),
        ({"heads": "3,4,4,4", "head_dim": "split"}, r"\b16\b.*\b3 heads\b.*\b2, 4\b"),
    ],
)
def test_wrong_lists_of_stages_are_refused(asked, words):
    source = open_source("davit-b", config_changes=FAMILIES["davit"][2])
    with pytest.raises(UsageError, match=words):
        plan(source, RequestedShape(**asked))


@pytest.mark.parametrize(
    ("preset", "tiny"),
    [
        ("xcit-l", dict(img_size=32, embed_dim=32, depth=4, num_heads=4)),
        ("volo-d3", dict(img_size=32, stem_hidden_dim=8, embed_dims=[16, 32, 32, 32], num_heads=[2, 4, 4, 4])),
    ],
)
def test_a_preset_starts_fresh_by_the_papers_policy(preset, tiny, tmp_path):
    source = open_source(preset, config_changes=tiny)
    steps = plan(source, RequestedShape(heads="8", layers="2"))
    carry_out(DecidedCut(steps), tmp_path / "out", check=False)
    built = sum(p.numel() for p in reload(tmp_path / "out").parameters())
    assert steps.policy == "split" and built == steps.parameters_after.total
    args = json.loads((tmp_path / "out/config.json").read_text())["model_args"]
    assert args["cls_num_heads"] == 4  # the class attention stays


NAMES = {
    "xcit_small_12_p8_224": "timm_xcit",
    "tnt_s_legacy_patch16_224": "timm_tnt",
    "volo_d5_512": "timm_volo",
    "davit_tiny": "timm_davit",
    "cait_m48_448": "timm_cait",
    "beitv2_large_patch16_224": "timm_beit",
    "beit_base_patch16_384": "timm_beit",
    "eva_giant_patch14_336": "timm_eva",
    "eva02_small_patch14_336": "timm_eva",
    "swin_base_patch4_window12_384": "timm_swin",
}


@pytest.mark.parametrize(("name", "family"), NAMES.items())
def test_named_models_of_timm_are_read_to_the_last_tensor(name, family):
    source = open_source(f"timm/{name}", weights=False)
    assert source.architecture.name == family
    with torch.device("meta"):
        model = timm.create_model(name)
        again = initialise(source.config, source.architecture, 0)
    assert source.parameters.total == sum(p.numel() for p in model.parameters())
    shapes = [{n: tuple(v.shape) for n, v in m.state_dict().items()} for m in (model, again)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("davit_base_fl", "spatial_block"),
        ("eva02_base_patch14_224", "q_proj"),
        ("eva02_enormous_patch14_clip_224", "EvaBlockPostNorm"),
        ("eva_large_patch14_196", "of the class VisionTransformer"),
    ],
)
def test_variants_that_are_not_declared_are_named(name, words):
    """By the declaration that goes by their name; then they are inferred (`architectures/infer/test_timm.py`)."""
    with pytest.raises(UnsupportedModel, match=words):
        source_config(architectures.find_declared({"architecture": name}), name, skeleton(name))


def test_auto_keeps_head_dim_where_our_modelling_file_is_needed_anyway(case):
    key, folder, _ = case
    steps = plan(open_source(str(folder)), RequestedShape(heads="2x", init="fresh-attention"))
    keeps = {"xcit", "volo", "cait", "swin"}
    assert steps.policy == ("keep" if key in keeps else "split")
    assert (steps.architecture.modelling is None) == (key not in keeps - {"swin"})


def test_swin_v2_loses_layers_in_pairs_and_its_heads_can_be_split_only(tmp_path):
    args = SMALL | dict(img_size=32, patch_size=2, embed_dim=8, depths=[2, 2, 4, 2], num_heads=[2, 2, 4, 4])
    args |= dict(window_size=4, mlp_ratio=2)
    model = stir(timm.create_model("swinv2_tiny_window8_256", **args))
    config = source_config(architectures.load_families()["timm_swin_v2"], "swinv2_tiny_window8_256", model, args)
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    source = open_source(str(folder))
    assert source.parameters.total == sum(p.numel() for p in model.parameters())
    assert [c.says for c in examine(source) if c.ok is False] == []
    steps, _ = cut(folder, tmp_path / "cut", layers="2,2,2,2")
    shallow, kept = reload(tmp_path / "cut"), steps.layers[4:6]
    assert kept == (4, 5)
    model.layers[2].blocks = torch.nn.Sequential(*(model.layers[2].blocks[i - 4] for i in kept))
    torch.testing.assert_close(output(shallow), output(model), atol=1e-5, rtol=1e-5)
    _, _ = cut(folder, tmp_path / "split", heads="4,4,8,8", init="fresh-attention")
    split = reload(tmp_path / "split").layers[2].blocks[0].attn
    assert split.num_heads == 8 and torch.allclose(split.logit_scale, torch.tensor(10.0).log())
    with pytest.raises(UnsupportedModel, match="timm_swin_v2 derives head_dim"):
        cut(folder, tmp_path / "wide", heads="2x", head_dim="keep")
