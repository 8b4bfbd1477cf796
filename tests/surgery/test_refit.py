"""The closed-form refit: against scikit-learn, on constructed cases, and the way from a projection to the output."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from leansurgeon.checkpoints.blockwise.skeleton import Skeleton
from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import ProjectionRefit
from leansurgeon.errors import Diverged
from leansurgeon.surgery import probes, refit_block, ridge, trim_units
from tests.conftest import architecture, build, example


def equations(a, e, weight=None, constant=True, worth=None):
    sums = ridge.NormalEquations(a.shape[1], e.shape[1], constant=constant, worth=worth)
    for part in torch.arange(len(a)).split(37):  # in batches, as the pipeline does
        sums.add(a[part], e[part], None if weight is None else weight[part])
    return sums


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def samples(tokens=200, inputs=12, outputs=5, seed=0):
    return draw(tokens, inputs, seed=seed) + 0.5, draw(tokens, outputs, seed=seed + 100)


@pytest.mark.parametrize("constant", [False, True])
def test_the_solution_is_that_of_weighted_ridge_regression(constant):
    a, e = samples()
    weight = draw(len(a), seed=3).abs().double()
    weight[::7] = 0  # padding
    sums = equations(a, e, weight, constant)
    alpha = 0.3 * float((weight[:, None] * a.double() ** 2).sum(0).mean())
    other = Ridge(alpha=alpha, fit_intercept=constant).fit(a.double(), e.double(), sample_weight=weight.numpy())
    found = sums.solve(0.3)
    np.testing.assert_allclose(found[:12].T, other.coef_, rtol=1e-8, atol=1e-10)
    if constant:
        np.testing.assert_allclose(found[12], other.intercept_, rtol=1e-8, atol=1e-10)
    left = e.double() - torch.from_numpy(other.predict(a.double().numpy()))
    assert sums.error(found) == pytest.approx(float((weight[:, None] * left**2).sum()), rel=1e-9)


def test_a_change_that_harms_the_guard_is_kept_out():
    a, noise = samples(tokens=14)  # about as many samples as inputs: everything is over-fitted
    guard = equations(*samples(tokens=400, seed=9))
    found = ridge.refit(equations(a, 3 * noise), guard, ridges=(1e-6, 1e-4))
    assert not found.record.kept and found.weight is None
    assert found.record.guard_after == found.record.guard_before == round(found.before, 6)
    assert min(found.record.tried.values()) > found.before


def test_numbers_that_are_none_are_an_error():
    a, e = samples()
    a[3, 4] = float("nan")
    with pytest.raises(Diverged, match="NaN or infinity"):
        equations(a, e)


def test_relative_weights_are_one_over_the_square():
    target = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.5]])
    assert ridge.relative_weights(target).tolist() == pytest.approx([1 / 25, 0.0, 4.0])


# -- in a block ------------------------------------------------------------------------------------


def filled(model, family):
    """A skeleton with layer 1 filled, and the stream of one batch."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    skeleton = Skeleton(config, architecture(family))
    state = {slot.file: model.state_dict()[slot.memory[0]].numpy() for slot in skeleton.slots.values()}
    skeleton.fill_outer(lambda name: state[name])
    skeleton.fill(1, {slot.file: state[slot.file] for slot in skeleton._in_block(1)})
    return skeleton, Stream(skeleton, [example(model)])


@torch.no_grad()
def site(family):
    """Layer 1 of a tiny model with a target that it does not give."""
    _, stream = filled(build(family), family)
    target = [x + draw(*x.shape, seed=4) for x in stream.run(1)]
    part = refit_block.Samples(stream, stream.hidden, target, [None])
    return refit_block.BlockFit(1, part, part)


@pytest.mark.parametrize("family", ["gpt2", "dinov2"])  # without and with a layer scale
@torch.no_grad()
def test_the_sums_hold_the_error_of_the_block(family):
    here = site(family)
    down = here.fit.stream.skeleton.mlp_down(1)
    if family == "dinov2":
        here.fit.stream.skeleton.block(1).layer_scale2.lambda1.copy_(torch.linspace(0.1, 3, 32))
    sums = refit_block.refit_sums(here, here.fit, down, probes.reach(down, here.first))
    assert sums.relative() == pytest.approx(refit_block.error(here, here.fit), rel=1e-3)
    change = sums.solve(0.1)
    probes.add_to(down, change[: sums.inputs].T, change[sums.inputs])
    assert sums.relative(change) == pytest.approx(refit_block.error(here, here.fit), rel=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@torch.no_grad()
def test_what_is_taken_back_is_as_it_was(family, monkeypatch):
    """Where the sums promise a gain that the block does not have."""
    here = site(family)
    skeleton = here.fit.stream.skeleton
    module = skeleton.projections(1)[0] if family == "gpt2" else skeleton.mlp_down(1)
    old = {name: p.clone() for name, p in here.fit.stream.skeleton.block(1).named_parameters()}
    size = probes.weight_of(module).shape
    promised = ProjectionRefit(True, 0.1, 1.0, 0.5, 0.5, 10, {})
    harm = ridge.Refit(7 * draw(*size), 7 * draw(size[0]), 1.0, promised)
    monkeypatch.setattr(ridge, "refit", lambda *_: harm)
    if family == "gpt2":
        record = refit_block.refit_attention(here, module, torch.ones(32))
    else:
        record = refit_block.absorb(here, torch.nn.LayerNorm(32)).record.down
    assert record.kept is False
    assert all(torch.equal(p, old[name]) for name, p in here.fit.stream.skeleton.block(1).named_parameters())


# -- trimming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("worth", "gone"), [(None, False), (torch.tensor([1.0, 1e-8, 1, 1, 1]), True)])
def test_outputs_count_by_their_worth_when_groups_are_chosen(group, worth, gone):
    """One group writes much into an output that hardly counts, the others little into one that does."""
    a, _ = samples(inputs=8)
    old = torch.zeros(5, 8).double()
    old[0], old[0, :group], old[1, :group] = 1.0, 0.1, 50.0
    sums = equations(a, torch.zeros(len(a), 5), worth=worth)
    found = trim_units.trim(sums.gram, sums.solve(1e-6), old, group, 8 // group - 1, 1e-6, sums.worth)
    assert (0 not in found.kept) is gone


@pytest.mark.parametrize(("group", "shared"), [(1, 1), (2, 2)])
def test_the_cost_of_a_group_is_the_error_of_least_squares_without_it(group, shared):
    a, e = samples(inputs=16)
    old = draw(5, 16, seed=2).double()
    old[:, :8] *= 0.1  # the weakest groups are all in the first half
    sums = equations(a, e)
    keep = 16 // group - shared
    found = trim_units.trim(sums.gram, sums.solve(0.0), old, group, keep, 0.0, sums.worth, shared)
    assert len(found.kept) == keep
    inputs = [g * group + i for g in found.kept for i in range(group)]
    target = e.double() + a.double() @ old.T
    best = np.linalg.lstsq(np.c_[a.double()[:, inputs], np.ones(len(a))], target.numpy(), rcond=None)[1].sum()
    assert sums.error(found.change) == pytest.approx(best, rel=1e-6)
    if shared == 2:  # as many heads of every key/value head
        assert sum(g < 4 for g in found.kept) == 3
