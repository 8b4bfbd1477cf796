"""What a calibrated cut will take here: operations as `calibrate` spends them, over what one block has shown.

The work is counted along the walk (a test holds it to what real cuts count). Block-tokens: one
token through one block; a training step is three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.source import Source
from leansurgeon.measure.data.choose_task import window
from leansurgeon.surgery.refit.heal import RIDGES
from leansurgeon.surgery.refit.span_fit import EPOCHS, PHASES, STEP_TOKENS
from leansurgeon.surgery.walk.budget import TRIAL, Effort, Tokens, refitted
from leansurgeon.surgery.walk.choose_layers import BLOCKS
from leansurgeon.surgery.walk.ground import PARTS, Ground
from leansurgeon.surgery.walk.grow import PASSES, block_steps, marks

STORED = 2  # bytes of a weight, as files have them
CONVERTED = 2e9  # bytes of weights a second that the host turns into fp32
MORE_SETS = 3  # sets of layers beside the blocks of neighbours
WAYS = 3  # candidates on all of the data: two ways of healing and another finalist
FIRST = 2_048  # tokens of a batch
RACED = 0.5  # of the guard of the trial, which a set of layers is judged on before it is left out


@dataclass(frozen=True)
class Size:
    """A model in numbers: parameters of one block, inputs of the attention's and the MLP's output projections."""

    block: int
    width: int
    inner: int
    mlp: int


def size_of(source: Source) -> Size:
    """The numbers of a source of one stage; of several the largest blocks count."""
    inside = sum(spec.size for spec in source.specs if spec.counted and spec.layer is not None)
    widest = max(source.shape.stages, key=lambda stage: stage.width)
    return Size(inside // source.shape.depth, widest.width, widest.inner, widest.mlp_dim)


@dataclass(frozen=True)
class Samples:
    """Tokens to fit and to guard in all and in the trial, and of one window."""

    fit: int
    guard: int
    trial_fit: int = TRIAL["fit"]
    trial_guard: int = TRIAL["guard"]
    window: int = 512


@dataclass(frozen=True)
class Work:
    """Block-tokens (training counted three times), blocks that are filled, refits on part and on all of the data."""

    tokens: float
    fills: float
    trials: int
    refits: int

    def passes(self, depth: int, samples: Samples) -> float:
        """In forward passes of the source over the samples to fit and to guard."""
        return self.tokens / (depth * (samples.fit + samples.guard))


def work(depth: int, lost: int, samples: Samples, *, local: bool = True, choice: bool = True) -> Work:
    """What a cut of `lost` layers does, the cut in the middle; without `choice` one set of layers is given."""
    sets = (min(BLOCKS, max(0, depth - lost)) + MORE_SETS if lost else 1) if choice else 0
    ways = WAYS if choice else 1
    before = (depth - lost) // 2
    behind = depth - lost - before

    def candidate(fit: int, guard: int, share: float = 1.0) -> float:
        """One candidate: its scale, its sums and outputs at the cut, a share of the guard alone behind it."""
        return refitted(Tokens(fit, guard, min(FIRST, guard)), Effort()) + share * guard * behind

    trial = candidate(samples.trial_fit, samples.trial_guard, RACED)
    tokens = depth * samples.trial_guard + depth * (samples.trial_fit + samples.trial_guard) if sets else 0.0
    tokens += sets * trial + depth * (samples.fit + samples.guard) + ways * candidate(samples.fit, samples.guard)
    fills = 3 * depth + (sets + ways) * (behind + 1)
    layers, stepped = 0, 0
    for number, phase in enumerate(PHASES if local and lost else ()):
        layers = min(2 * (number + 1), behind + 1)
        steps = min(phase.steps, EPOCHS * max(1, samples.fit // STEP_TOKENS))
        stepped += layers * 3 * steps * STEP_TOKENS
        tokens += layers * 2 * samples.guard
    tokens += min(stepped, PASSES * depth * (samples.fit + samples.guard))
    tokens += samples.guard * behind if layers else 0
    return Work(tokens, fills + layers + behind, sets, ways)


def seconds(size: Size, done: Work, samples: Samples, rate: float, slower: int) -> float:
    """How long the work takes: products at `rate` operations a second, sums and solutions of refits, which are so much
    `slower`, weights on their way.
    """
    total = done.tokens * (2 * size.block + 4 * samples.window * size.inner) / rate
    sums = 2 * size.mlp * (size.mlp + size.width)  # a token's part of the normal equations
    solving = len(RIDGES) * (size.mlp**3 / 3 + 4 * size.mlp**2 * size.width)
    told = done.trials * (samples.trial_fit + samples.trial_guard) + done.refits * (samples.fit + samples.guard)
    total += slower * (told * sums + 2 * (done.trials + done.refits) * solving) / rate
    return total + done.fills * size.block * STORED / CONVERTED


@dataclass(frozen=True)
class Foretold:
    """About how many passes of the source a cut will take, over how many tokens, and how long that is here."""

    passes: float
    tokens: int
    seconds: float

    def told(self, name: str) -> str:
        """One line for a person.

        >>> Foretold(5.4, 40_960, 251.0).told("SmolLM2")
        'About 5 passes of SmolLM2 over 40,960 tokens: some 4 minutes here.'
        """
        number, unit = (self.seconds, "second") if self.seconds < 90 else (self.seconds / 60, "minute")
        long = f"some {max(1, round(number)):,} {unit}{'' if round(number) <= 1 else 's'} here"
        return f"About {max(1, round(self.passes))} passes of {name} over {self.tokens:,} tokens: {long}."


def foretell(ground: Ground) -> Foretold:
    """What the cut will take if all that it tries gains, within its bounds; the time by one block on one real batch."""
    plan, options = ground.plan, ground.options
    fit, guard = (int(ground.tokens(getattr(ground.calibration, part))) for part in PARTS)
    samples = Samples(fit, guard, min(fit, TRIAL["fit"]), min(guard, TRIAL["guard"]), window(ground.source))
    lost = plan.before.depth - plan.after.depth
    choice = bool(lost) and options.keep is None
    closed, local = (
        work(plan.before.depth, lost, samples, local=grows, choice=choice) for grows in (False, options.grows)
    )
    bounded = min(closed.tokens + ground.anew, ground.most_closed)
    grown = local.tokens - closed.tokens if lost else divided(ground, samples)
    rate, slower = timed(ground), 1 if ground.is_exact else 2  # single precision beside products in bf16
    size, tokens = size_of(ground.source), min(bounded + grown, ground.most)
    took = seconds(size, replace(local, tokens=tokens), samples, rate, slower)
    before = seconds(size, replace(local, tokens=bounded), samples, rate, slower)
    if options.heal_time is not None and took - before > options.heal_time:  # the rest of the local fit is left out
        tokens = bounded + (tokens - bounded) * options.heal_time / (took - before)
        took = before + options.heal_time
    return Foretold(tokens / ground.one_pass, fit + guard, took)


def divided(ground: Ground, samples: Samples) -> float:
    """Block-tokens of the local fit of a plan that drops no layers: of short stages whose heads are divided."""
    layers = tuple(range(ground.plan.before.depth))
    spans = marks(layers, layers, set(), ground) if ground.options.grows else []
    return min(PASSES * ground.one_pass, 3.0 * block_steps(spans, max(1, samples.fit // STEP_TOKENS)) * STEP_TOKENS)


def timed(ground: Ground) -> float:
    """Operations a second of the first block on the first batch to fit, the better of two runs behind a first."""
    stream, took = Stream(ground.teacher, ground.calibration.fit[:1]), inf
    ground.fill(0)
    stream.run()
    for _ in range(2):
        start = perf_counter()
        float(stream.run()[0].sum())  # a GPU has finished it then
        took = min(took, perf_counter() - start)
    ground.teacher.empty(0)
    size, hidden = size_of(ground.source), stream.hidden[0]
    return hidden.numel() / hidden.shape[-1] * (2 * size.block + 4 * window(ground.source) * size.inner) / took
