"""The closed-form refit: against scikit-learn, on constructed cases, and the way from a projection to the output."""

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.blockwise.skeleton import Skeleton
from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import ProjectionRefit
from leansurgeon.errors import Diverged
from leansurgeon.surgery import probes, refit_block, ridge, trim_units
from tests.conftest import architecture, build, example


def equations(a, e, weight=None, constant=True):
    sums = ridge.NormalEquations(a.shape[1], e.shape[1], constant=constant)
    for part in torch.arange(len(a)).split(37):  # in batches, as the pipeline does
        sums.add(a[part], e[part], None if weight is None else weight[part])
    return sums


def samples(tokens=200, inputs=12, outputs=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, inputs, generator=generator) + 0.5, torch.randn(tokens, outputs, generator=generator)


@pytest.mark.parametrize("constant", [False, True])
def test_the_solution_is_that_of_weighted_ridge_regression(constant):
    from sklearn.linear_model import Ridge

    a, e = samples()
    weight = torch.rand(len(a), generator=torch.Generator().manual_seed(3)).double()
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


def test_what_is_linear_in_the_activations_is_found_again():
    a, _ = samples()
    true = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    found = ridge.refit(equations(a, a @ true.T + 2), equations(*(x[:50] for x in (a, a @ true.T + 2))), ridges=(1e-9,))
    assert found.record.kept and found.record.guard_after < 1e-5
    torch.testing.assert_close(found.weight, true, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.bias, torch.full((5,), 2.0), rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit", "gpt_neox"])
def test_a_pre_norm_projection_reaches_the_output_as_it_is(family):
    scale = reach_of(family)
    torch.testing.assert_close(scale, torch.ones_like(scale), rtol=1e-4, atol=1e-4)


def test_a_layer_scale_is_measured():
    model = build("dinov2")
    scale = reach_of("dinov2", model)
    down = next(p for n, p in model.named_parameters() if ".1." in n and n.endswith("layer_scale2.lambda1"))
    torch.testing.assert_close(scale, down.detach(), rtol=1e-3, atol=1e-4)


def test_behind_a_post_norm_there_is_no_plain_sum():
    assert reach_of("bert") is None


def reach_of(family, model=None):
    skeleton, stream = filled(model or build(family), family)
    with torch.no_grad():
        return probes.reach(skeleton.mlp_down(1), lambda: stream.call(0, stream.hidden[0], 1))


def filled(model, family):
    """A skeleton with layer 1 filled, and the stream of one batch."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    skeleton = Skeleton(config, architecture(family))
    state = {slot.file: model.state_dict()[slot.memory[0]].numpy() for slot in skeleton.slots.values()}
    skeleton.fill_outer(lambda name: state[name])
    skeleton.fill(1, {slot.file: state[slot.file] for slot in skeleton._in_block(1)})
    return skeleton, Stream(skeleton, [example(model)])


def site(family):
    """Layer 1 of a tiny model with a target that it does not give."""
    _, stream = filled(build(family), family)
    with torch.no_grad():
        target = stream.run(1)
    target = [x + torch.randn(x.shape, generator=torch.Generator().manual_seed(4)) for x in target]
    part = refit_block.Samples(stream, stream.hidden, target, [None])
    return refit_block.BlockFit(1, part, part)


@pytest.mark.parametrize("family", ["gpt2", "dinov2"])  # without and with a layer scale
def test_the_sums_hold_the_error_of_the_block(family):
    here = site(family)
    down = here.fit.stream.skeleton.mlp_down(1)
    with torch.no_grad():
        if family == "dinov2":
            here.block.layer_scale2.lambda1.copy_(torch.linspace(0.1, 3, 32))
        sums = refit_block.refit_sums(here, here.fit, down, probes.reach(down, here.first))
        assert sums.relative() == pytest.approx(refit_block.error(here, here.fit), rel=1e-3)
        change = sums.solve(0.1)
        probes.add_to(down, change[: sums.inputs].T, change[sums.inputs])
        assert sums.relative(change) == pytest.approx(refit_block.error(here, here.fit), rel=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_what_is_taken_back_is_as_it_was(family, monkeypatch):
    here = site(family)
    shape = here.fit.stream.skeleton.projections(1)[0] if family == "gpt2" else here.fit.stream.skeleton.mlp_down(1)
    old = {name: p.detach().clone() for name, p in here.block.named_parameters()}
    size = probes.weight_of(shape).shape
    refit = ridge.Refit(
        torch.randn(size) * 7, torch.randn(size[0]) * 7, 1.0, ProjectionRefit(True, 0.1, 1.0, 0.5, 0.5, 10, {})
    )
    monkeypatch.setattr("leansurgeon.surgery.ridge.refit", lambda *_: refit)
    errors = iter((1.0, 2.0))
    monkeypatch.setattr("leansurgeon.surgery.refit_block.error", lambda *_: next(errors))
    with torch.no_grad():
        if family == "gpt2":
            record = refit_block.refit_attention(here, shape, torch.ones(32))
        else:
            closing = torch.nn.LayerNorm(32)
            closing.weight.fill_(0.7), closing.bias.fill_(1.0)
            record = refit_block.absorb(here, closing).record.down
    assert record.kept is False
    assert all(torch.equal(p, old[name]) for name, p in here.block.named_parameters())


# -- trimming -------------------------------------------------------------------------------------


def test_a_copy_goes_first_and_its_work_is_taken_over():
    """Unit 3 says what units 0 and 1 say together: large weights do not save it, and nothing is lost."""
    a, _ = samples(inputs=6)
    a[:, 3] = a[:, 0] + a[:, 1]
    old = torch.randn(5, 6, generator=torch.Generator().manual_seed(2)).double()
    old[:, 3] *= 10
    sums = equations(a, torch.zeros(len(a), 5))
    found = trim_units.trim(sums.gram, sums.solve(1e-9), old, 1, 5, 1e-9, sums.worth)
    gone = set(range(6)) - set(found.kept)
    assert gone <= {0, 1, 3}
    assert sums.error(found.change) / len(a) < 1e-6
    assert not (old.T + found.change[:6])[sorted(gone)].any()


@pytest.mark.parametrize("group", [1, 2])
def test_outputs_count_by_their_worth_when_groups_are_chosen(group):
    """One group writes much into outputs that hardly count, the others little into those that do."""
    a, _ = samples(inputs=8)
    old = torch.zeros(5, 8).double()
    old[0], old[1, :group], worth = 1.0, 50.0, torch.tensor([1.0, 1e-8, 1, 1, 1])
    old[0, :group] = 0.1
    for sizes, gone in ((None, False), (worth, True)):
        sums = ridge.NormalEquations(8, 5, constant=True, worth=sizes)
        sums.add(a, torch.zeros(len(a), 5))
        found = trim_units.trim(sums.gram, sums.solve(1e-6), old, group, 8 // group - 1, 1e-6, sums.worth)
        assert (0 not in found.kept) is gone
        left = a.double() @ found.change[:8] + found.change[8]
        size = torch.ones(5) if sizes is None else sizes
        assert sums.error(found.change) == pytest.approx(float((left.square() * size).sum()), rel=1e-6)


@pytest.mark.parametrize(("group", "shared"), [(1, 1), (2, 1), (2, 2)])
def test_the_cost_of_a_group_is_the_error_of_least_squares_without_it(group, shared):
    a, e = samples(inputs=8)
    old = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)).double()
    sums = equations(a, e)
    keep = 8 // group - shared
    found = trim_units.trim(sums.gram, sums.solve(0.0), old, group, keep, 0.0, sums.worth, shared)
    assert len(found.kept) == keep
    inputs = [g * group + i for g in found.kept for i in range(group)]
    target = e.double() + a.double() @ old.T
    best = np.linalg.lstsq(np.c_[a.double()[:, inputs], np.ones(len(a))], target.numpy(), rcond=None)[1].sum()
    assert sums.error(found.change) == pytest.approx(best, rel=1e-6)
    if shared == 2:  # as many heads of every key/value head
        assert sum(g < 2 for g in found.kept) == 1


def test_relative_weights_are_one_over_the_square() -> None:
    target = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.5]])
    assert ridge.relative_weights(target).tolist() == pytest.approx([1 / 25, 0.0, 4.0])


class Parts(torch.nn.Module):
    """A pre-norm block without norms: what its attention says reaches the output directly, and through the MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.gain = torch.nn.Linear(8, 8), torch.linspace(0.5, 2, 8)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.gain * self.attention(x)
        return x + self.mlp(x)


@torch.no_grad()
def test_the_direct_way_counts_where_what_lies_behind_is_held():
    parts, x = Parts(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    direct = probes.reach(parts.attention, lambda: parts(x), freeze=parts.mlp)
    assert torch.allclose(direct, parts.gain, atol=1e-5)
    assert probes.reach(parts.attention, lambda: parts(x)) is None
    assert torch.allclose(probes.reach(parts.mlp, lambda: parts(x)), torch.ones(8), atol=1e-5)
