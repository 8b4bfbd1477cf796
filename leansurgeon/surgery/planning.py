"""Plan an operation: which operators lead from the present shape to the requested one, and what that saves. A plan is a
value; making one changes nothing.

`plan` reads no weights. Heads and units that are chosen by weight are chosen during execution, and recorded in
surgery.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from leansurgeon.architectures import infer
from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.match import match
from leansurgeon.checkpoints.record import PlanRecord, Step
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.costs.flops import Flops, closed_form
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import SPACINGS, ParameterCount, Shape
from leansurgeon.surgery import drop_layers
from leansurgeon.surgery.class_attention import follow
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.next_steps import UnfitFormats, cannot_hold
from leansurgeon.surgery.operators import order_operators
from leansurgeon.surgery.requested_shape import RequestedShape, Target, resolve


@dataclass(frozen=True)
class Plan:
    """What `transfer.apply` will do. `layers[j]` is the source layer that becomes layer j; `target` is the result."""

    before: Shape
    target: Reshaped = field(repr=False, compare=False)
    policy: str
    why: str
    init: str
    seed: int
    method: Method
    calibrated: bool
    layers: tuple[int, ...]
    operators: tuple[Step, ...]
    parameters_before: ParameterCount
    parameters_after: ParameterCount
    saved_by: dict[str, int]
    # For one forward pass; None for families without a closed form.
    flops_before: Flops | None = None
    flops_after: Flops | None = None
    flops_saved_by: dict[str, int] | None = None
    class_attention: bool = False
    heads_by: str | None = None  # what chooses the heads to keep, in words; None: sample data, else the weights
    # Measured importance of the heads of (layer, attention in the layer), if that chooses the heads to keep.
    strength: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def source(self) -> Source:
        """The source as the plan reads it: on request, with its class attention tied to the blocks."""
        return self.target.source

    @property
    def result(self) -> Reshaped:
        """The target with the kept layers."""
        return self.target.keeping(self.layers)

    @property
    def after(self) -> Shape:
        """Shape of the result."""
        return self.target.shape

    @property
    def architecture(self) -> Architecture:
        """Family that holds the result."""
        return self.target.architecture

    @property
    def exactness(self) -> str:
        """The weakest promise among the operators."""
        promises = {o.exactness for o in self.operators}
        return next((e for e in ("fresh", "near", "exact") if e in promises), "exact")

    @property
    def cannot_hold(self) -> UnfitFormats | None:
        """Formats that know the source's family but cannot hold the result; None if there are none."""
        return cannot_hold(self.source.architecture, self.architecture, self.after, self.source.config, self.layers)

    @property
    def asks_data(self) -> bool:
        """Whether sample data would choose or heal something."""
        chosen = self.method.keep is not None or self.method.layers in SPACINGS
        only_drops = all(o.name == "drop-layers" for o in self.operators if o.exactness == "near")
        return self.exactness == "near" and not (chosen and only_drops and not self.method.refits)

    def as_record(self) -> PlanRecord:
        """Return the plan as `surgery.json` stores it."""
        flops = (flops and flops.as_dict() for flops in (self.flops_before, self.flops_after))
        return PlanRecord(
            self.source.name,
            self.architecture.name,
            dict(self.architecture.evidence),
            self.policy,
            self.why,
            self.init,
            self.seed,
            asdict(self.method),
            self.calibrated,
            self.class_attention,
            self.before,
            self.after,
            self.layers,
            self.operators,
            self.exactness,
            self.parameters_before.as_dict(),
            self.parameters_after.as_dict(),
            self.saved_by,
            *flops,
            self.flops_saved_by,
        )

    def as_dict(self) -> JsonObject:
        """Return the plan as `plan --json` prints it."""
        return self.as_record().as_dict()


def plan(
    source: Source,
    wanted: RequestedShape,
    seed: int = 0,
    method: Method | None = None,
    *,
    calibrated: bool = False,
    heads_by: str | None = None,
) -> Plan:
    """Plan the operators for the requested shape. `calibrated` says whether sample data is available; `heads_by`
    describes what, other than data or weights, chooses the heads to keep. Raises `UsageError` for an impossible shape,
    or if data is needed and missing.
    """
    method = method or Method()
    wanted.check()
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be at least 0 and below 2^63, and {seed} was given.")
    target, resolved = reshape_source(source, drop_layers.with_kept(source.shape, wanted, method))
    source, init = target.source, "fresh" if source.weights is None else wanted.init
    choice = drop_layers.without_data(source.shape, target.shape, method, source.architecture.period, source)
    target = target.keeping(choice.kept)
    target.config()  # rejects an impossible config
    refuse_moved_layers(source, init, choice.kept)
    drop_layers.refuse_misplaced(source, init, choice.kept)
    arch = source.architecture
    apart = any(spec.name in arch.tied and spec.role == "head" for spec in source.specs)
    if init == "fresh" and source.weights is not None and arch.ties_new and apart:  # transformers' T5
        raise UsageError(
            f"{arch.library} ties the output of every new {arch.name} to its embedding, and this model's stands apart.",
            "Use --init fresh-attention, or --init transfer.",
        )
    along = models_along(target)
    counts = [model.parameters for model in along]
    flops = [closed_form(m.specs, m.shape, m.converted, m.architecture) for m in along]
    return Plan(
        before=source.shape,
        target=target,
        policy=resolved.policy,
        why=resolved.why + ("; the class attention has the same heads" if wanted.class_attention else ""),
        class_attention=wanted.class_attention,
        init=init,
        seed=seed,
        method=method,
        calibrated=calibrated and init != "fresh",
        layers=choice.kept,
        heads_by=heads_by,
        operators=order_operators(target, init, choice, method, calibrated, heads_by),
        parameters_before=counts[0],
        parameters_after=counts[-1],
        saved_by=list_savings(counts),
        flops_before=flops[0],
        flops_after=flops[-1],
        flops_saved_by=list_savings(flops) if None not in flops else None,
    )


def reshape_source(source: Source, wanted: RequestedShape) -> tuple[Reshaped, Target]:
    """Return the model at the requested shape, and how the request was resolved. Its source is read as the shape needs
    it: with class attention tied to the blocks on request, and with an inferred declaration if the declared family has
    no form for heads of their own size. Raises `UsageError` for an impossible shape.
    """
    source = follow(source) if wanted.class_attention else source
    try:
        resolved = resolve(source, wanted)
    except UnsupportedModel:
        arch, inferred = source.architecture, None
        own = arch.stores_head_dim or arch.decoupled or arch.evidence
        if arch.library == "transformers" and not own and source.weights:
            config = infer.complete_config(source.config)
            with suppress(UnsupportedModel):
                found = infer.architecture(config)
                specs = match(found, config, source.weights.shapes)
                inferred = found if found.decoupled else None
        if inferred is None:
            raise
        source = replace(source, config=config, architecture=inferred, specs=specs)
        resolved = resolve(source, wanted)
    return Reshaped(source, resolved.architecture, resolved.shape), resolved


def without_data(steps: Plan) -> Plan:
    """Return the same plan without sample data. Raises `UsageError` if some step needs it."""
    period = steps.source.architecture.period
    choice = drop_layers.without_data(steps.before, steps.after, steps.method, period, steps.source)
    return keeping(replace(steps, calibrated=False), choice)


def keeping(plan: Plan, choice: drop_layers.LayerChoice) -> Plan:
    """Return the same plan with the layers that sample data has chosen. Raises `UsageError` if they cannot be moved."""
    refuse_moved_layers(plan.source, plan.init, choice.kept)
    steps = order_operators(plan.target, plan.init, choice, plan.method, plan.calibrated, plan.heads_by)
    return replace(plan, target=plan.target.keeping(choice.kept), layers=choice.kept, operators=steps)


def refuse_moved_layers(source: Source, init: str, kept: tuple[int, ...]) -> None:
    """Raise `UsageError` if the config makes a layer's arithmetic depend on its number and a kept layer moves."""
    config = source.flat_config
    keys = [key for key in source.architecture.depends_on_index if config.get(key)]
    if keys and init == "transfer" and kept != tuple(range(len(kept))):
        raise UsageError(
            f"This model's config sets {keys[0]}: a layer's scale depends on its number, so kept layers would change.",
            "Use --init fresh, or keep every layer.",
        )


def models_along(target: Reshaped) -> list[Reshaped]:
    """Return the model before (in the family of the result), after dropping layers, after changing heads, and the
    result.

    The order decides what each step is credited with: depth first, then heads on the remaining layers, then the MLP.
    """
    now = target.source.shape
    stages = list(zip(now.stages, target.shape.stages, strict=True))
    shorter = Shape(tuple(replace(a, depth=b.depth) for a, b in stages))
    with_heads = Shape(tuple(replace(b, mlp_dim=a.mlp_dim) for a, b in stages))
    along = [target]
    for shape in (with_heads, shorter, now):  # backwards, so a step without changes gives the same model
        along.insert(0, along[0].at(shape))
    return along


def list_savings(costs: Sequence[ParameterCount | Flops]) -> dict[str, int]:
    """Return what each step of `models_along` saves; negative if it adds."""
    return {step: a.total - b.total for step, a, b in zip(("depth", "heads", "mlp"), costs, costs[1:], strict=False)}
