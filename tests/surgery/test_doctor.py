"""The doctor must pass every family, and catch declarations that are wrong in a role or in what operators rely on."""

from dataclasses import replace

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.surgery.doctor import OPERATORS, ROLES, examine
from tests.conftest import FAMILIES, FIXED, SPLIT_ONLY
from tests.support.models.small_models import OURS
from tests.support.models.undeclared import small_model

SEVERAL = {"t5", "mt5", "bart", "mbart", "davit-b", "volo-d3"}  # attentions in a block, or one without queries
NOT_TRIED = {
    "added heads": {*SPLIT_ONLY, *FIXED},
    "split heads": {*SPLIT_ONLY, *FIXED, *SEVERAL, "xcit-m"},
}


def wrong(checks):
    return {c.name: c.says for c in checks if c.ok is False}


def rest(names, chosen):
    """The chosen names, and all others for `-m families`."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.families) for name in names]


def assert_sound(source, name, not_tried):
    checks = examine(source)
    assert wrong(checks) == {}
    assert [c.name for c in checks] == [*ROLES, "control", *OPERATORS]
    assert {c.name for c in checks if c.ok is None} == not_tried
    assert f"{source.parameters.total:,} parameters" in checks[0].says


@pytest.mark.parametrize("name", rest([*FAMILIES, *OURS], ("bert", "llama", "bert-crammed", "xcit-m", "davit-b")))
def test_the_doctor_finds_every_family_as_declared(name, saved):
    ours = name in OURS
    source = open_source(name, config_changes=OURS[name]) if ours else open_source(str(saved(name)[0]))
    assert_sound(source, name, {operator for operator, families in NOT_TRIED.items() if name in families})


def as_role(arch, roles: dict[str, str]):
    """The same declaration with roles renamed."""
    return replace(arch, block=tuple(replace(t, role=roles.get(t.role, t.role)) for t in arch.block))


def with_axes(arch, changes: dict[str, str]):
    def changed(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(changes.get(" ".join(axes), " ".join(axes)).split())

    return replace(arch, block=tuple(replace(t, axes=changed(t.axes)) for t in arch.block))


WRONG = [  # family, what is wrong about the declaration, and the check that must notice
    ("bert", lambda a: as_role(a, {"q": "v", "v": "q"}), "values"),
    ("bert", lambda a: replace(a, projection="encoder.layer.{i}.output.dense"), "output projections"),
    ("bert", lambda a: replace(a, block=a.block[:-1]), "roles"),
    ("bert", lambda a: with_axes(a, {"mlp width": "width mlp", "width mlp": "mlp width"}), "roles"),
    ("distilbert", lambda a: as_role(a, {"up": "down", "down": "up"}), "MLP"),
    # Interleaved head by head in the file, declared as stacked (and the other way round): no shape tells.
    ("gpt_neox", lambda a: with_axes(a, {"heads*qkv width": "q+kv+kv width", "heads*qkv": "q+kv+kv"}), "values"),
    ("gpt2", lambda a: with_axes(a, {"width q+kv+kv": "width heads*qkv", "q+kv+kv": "heads*qkv"}), "values"),
]


@pytest.mark.parametrize(("family", "spoil", "notices"), WRONG)
def test_the_doctor_catches_a_wrong_declaration(family, spoil, notices, saved):
    sizes = dict(hidden_dim=32) if family == "distilbert" else {}  # so that up and down have one shape
    folder, _ = saved(family, **sizes)
    source = open_source(str(folder))
    assert notices in wrong(examine(source, spoil(source.architecture)))


def without_heads(arch):
    """T5's tables of positions as if their columns belonged to no head."""

    def blocks(stage):
        columns = (replace(t, axes=tuple(a.replace("heads", "columns") for a in t.axes)) for t in stage.block)
        return replace(stage, block=tuple(columns))

    sizes = {**arch.sizes, "columns": lambda config: config["num_heads"]}
    return replace(arch, stages=tuple(map(blocks, arch.stages)), sizes=sizes)


def heads_may_change(arch):
    """OLMo2 as the shapes in its file have it: norms of queries and keys, as others have them over one head."""
    block = tuple(replace(t, role="qk_norm" if t.role == "qk_norm_all" else t.role) for t in arch.block)
    return replace(arch, block=block, refused={})


# family, changes of its config, a declaration that fits every tensor and misses how the library computes, and the
# operator that does not work out with it
UNFIT = [
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), lambda a: replace(a, depends_on_index=()), "dropped layers"),
    ("t5", {}, without_heads, "another order"),
    ("olmo2", {}, heads_may_change, "added heads"),
]


@pytest.mark.parametrize(("family", "changes", "spoil", "notices"), UNFIT, ids=[case[0] for case in UNFIT])
def test_the_doctor_applies_the_operators(family, changes, spoil, notices, saved):
    folder, _ = saved(family, **changes)
    source = open_source(str(folder))
    found = wrong(examine(source, spoil(source.architecture)))
    assert set(found) & set(ROLES) == set() and notices in found


def test_a_family_that_was_inferred_is_examined_as_any_other(tmp_path):
    small_model("bloom", tmp_path / "source", n_layer=4)
    source = open_source(str(tmp_path / "source"))
    checks = examine(source)
    assert source.architecture.evidence and wrong(checks) == {}
    untried = {c.name for c in checks if c.ok is None}
    assert {"roles", "rebuild", "control", "another order"}.isdisjoint(untried)
