"""What a calibrated cut would take on a GPU: operations and bytes as `calibrate` spends them, over what cards can do.

A projection, and no measurement: the work is counted along the walk (a test holds it to what real cuts count), rates
are shares of the makers' figures. Block-tokens: one token through one block; a training step is three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.source import Source
from leansurgeon.measure.data.calibration import LINES, TOKENS
from leansurgeon.measure.data.choose_task import window
from leansurgeon.surgery.refit.heal import RIDGES
from leansurgeon.surgery.refit.span_fit import EPOCHS, PHASES, STEP_TOKENS
from leansurgeon.surgery.walk.budget import TRIAL, Effort, Tokens, refitted
from leansurgeon.surgery.walk.choose_layers import BLOCKS
from leansurgeon.surgery.walk.ground import PARTS, SHARE, SPANS, STREAMS, TRAINED, Ground
from leansurgeon.surgery.walk.grow import PASSES, block_steps, marks

REACHED = 0.4  # of the peak rates
CONVERTED = 2e9  # bytes of weights a second that the host turns into fp32
MORE_SETS = 3  # sets of layers beside the blocks of neighbours
WAYS = 3  # candidates on all of the data: two ways of healing and another finalist
FIRST = 2_048  # tokens of a batch
RACED = 0.5  # of the guard of the trial, which a set of layers is judged on before it is left out


@dataclass(frozen=True)
class Card:
    """Peak rates of a GPU by its maker's data sheet: operations a second, bytes a second from the host, bytes."""

    title: str
    bf16: float
    fp32: float
    fp64: float
    link: float
    memory: float


CARDS = (
    Card("A100 80 GB", 312e12, 19.5e12, 19.5e12, 32e9, 80e9),
    Card("H100 80 GB", 989e12, 67e12, 67e12, 64e9, 80e9),
)


@dataclass(frozen=True)
class Size:
    """A model in numbers: parameters of one block and of what stands outside, inputs of the MLP's output projection."""

    name: str
    depth: int
    block: int
    outside: int
    width: int
    inner: int
    mlp: int
    bytes_each: float = 2.0  # as stored

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.depth * self.block + self.outside


def decoder(name: str, depth: int, width: int, inner: int, shared: int, mlp: int, vocabulary: int, tied: bool) -> Size:
    """A Llama: `shared` is the width of keys and of values."""
    block = 2 * width * inner + 2 * width * shared + 3 * width * mlp + 2 * width
    return Size(name, depth, block, (1 if tied else 2) * vocabulary * width + width, width, inner, mlp)


KNOWN = (
    decoder("1B (Llama 3.2)", 16, 2048, 2048, 512, 8192, 128_256, True),
    decoder("8B (Llama 3.1)", 32, 4096, 4096, 1024, 14_336, 128_256, False),
    decoder("70B (Llama 3.1)", 80, 8192, 8192, 1024, 28_672, 128_256, False),
)


def size_of(source: Source) -> Size:
    """The numbers of a source of one stage; of several the largest blocks count."""
    stages, counted = source.shape.stages, [spec for spec in source.specs if spec.counted]
    inside = sum(spec.size for spec in counted if spec.layer is not None)
    widest = max(stages, key=lambda stage: stage.width)
    outside = sum(spec.size for spec in counted if spec.layer is None)
    depth = source.shape.depth
    return Size(source.name, depth, inside // depth, outside, widest.width, widest.inner, widest.mlp_dim)


@dataclass(frozen=True)
class Samples:
    """Tokens to fit and to guard in all and in the trial, and of one window."""

    fit: int
    guard: int
    trial_fit: int = TRIAL["fit"]
    trial_guard: int = TRIAL["guard"]
    window: int = 512

    @classmethod
    def of(cls, source: Source) -> Samples:
        """The defaults for a model of text; of others about as many tokens."""
        length = window(source)
        if source.architecture.causal:
            return cls(TOKENS["fit"], TOKENS["guard"], window=length)
        return cls(64 * LINES["fit"] // 2, 64 * LINES["guard"] // 2, window=min(length, 64))


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


@dataclass(frozen=True)
class Projected:
    """Minutes on one card, bytes in its memory and in the host's."""

    model: str
    card: str
    layers: int
    passes: float
    minutes: float
    gpu: float
    host: float


def seconds(size: Size, done: Work, samples: Samples, card: Card) -> float:
    """How long the work takes: products, sums and solutions of refits, weights on their way."""
    each = 2 * size.block + 4 * samples.window * size.inner
    total = done.tokens * each / (REACHED * card.bf16)
    sums = 2 * size.mlp * (size.mlp + size.width)  # a token's part of the normal equations
    solving = len(RIDGES) * (size.mlp**3 / 3 + 4 * size.mlp**2 * size.width)
    told = done.trials * (samples.trial_fit + samples.trial_guard) + done.refits * (samples.fit + samples.guard)
    total += told * sums / (REACHED * card.fp32) + (done.trials + done.refits) * solving / (REACHED * card.fp64)
    moved = done.fills * size.block
    return total + moved * size.bytes_each / CONVERTED + moved * 4 / (REACHED * card.link)


def project(size: Size, lost: int, samples: Samples, card: Card) -> Projected:
    """One cut on one card."""
    done = work(size.depth, lost, samples)
    states = STREAMS * 4 * size.width * (samples.fit + samples.guard)
    solved = 8 * (4 * size.mlp**2 + 4 * size.mlp * size.width)
    outside = 4 * size.outside
    room = card.memory - outside
    longest = int(SPANS * room / (TRAINED * 4 * size.block))
    span = max((2 * (n + 1) for n in range(len(PHASES)) if 2 * (n + 1) <= longest), default=0)
    at_home = states < SHARE * card.memory
    gpu = outside + max(8 * size.block + solved, TRAINED * 4 * span * size.block) + (states if at_home else 0)
    host = 3 * 4 * size.block + outside + (0 if at_home else states)
    return Projected(
        size.name, card.title, size.depth - lost, done.passes(size.depth, samples),
        seconds(size, done, samples, card) / 60, gpu, host
    )  # fmt: skip


def projections(source: Source, layers: int) -> Sequence[Projected]:
    """The source, and 1B, 8B and 70B by the same share of layers, on every card."""
    lost = source.shape.depth - layers
    share, samples = lost / source.shape.depth, Samples.of(source)
    projected = [project(size_of(source), lost, samples, card) for card in CARDS]
    text = Samples(TOKENS["fit"], TOKENS["guard"])
    return [*projected, *(project(size, max(1, round(share * size.depth)), text, c) for size in KNOWN for c in CARDS)]


# -- the cut that is about to begin ----------------------------------------------------------------


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
    rate = timed(ground) / REACHED
    slower = 1 if ground.is_exact else 2  # single precision beside products in bf16
    here = Card("here", rate, rate / slower, rate / slower / 2, inf, inf)
    size, tokens = size_of(ground.source), min(bounded + grown, ground.most)
    took = seconds(size, replace(local, tokens=tokens), samples, here)
    before = seconds(size, replace(local, tokens=bounded), samples, here)
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
