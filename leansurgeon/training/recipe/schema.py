"""Recipes: YAML files that describe a training (`TrainingRecipe`) or an experiment (`ExperimentRecipe`), with every
default. No torch.

Unknown keys are refused. A run's settings come from the recipe alone; what a recipe leaves out has the default below.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training.recipe.durations import Counted, DurationText, Warmup, parse_duration

Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch's range
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class Strict(BaseModel):
    """Refuses unknown keys and non-finite numbers; values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Optim(Strict):
    """The optimizer: AdamW (Loshchilov and Hutter, 2019), Adam with decay in the gradient, SGD with momentum, or LAMB
    (You et al., 2020). Biases, norms and position/class embeddings are never decayed.
    """

    name: Literal["adamw", "adam", "sgd", "lamb"] = "adamw"
    lr: Positive
    # trainings with fewer steps get a lower rate: lr * sqrt(steps / full_steps)
    full_steps: Count | None = None
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: Amount = 0.0
    momentum: Fraction = 0.9  # sgd only


class Schedule(Strict):
    """The learning rate over the training.

    `cosine`, `linear`, `constant`: linear warm-up from `warmup_lr`, then down to `min_lr`. `triangle`: from `base` of
    the rate up to all of it, then linearly to 0 in the last `fall` (the budget triangle of Crammed BERT, Geiping and
    Goldstein, 2023). `one-cycle`: from lr / `div` up to lr during `warmup`, then down to lr / `div` / `final_div`, with
    momentum going the other way (Smith and Topin, 2019, as in torch's OneCycleLR).
    """

    name: Literal["cosine", "linear", "constant", "one-cycle", "triangle"] = "cosine"
    warmup: Warmup = 0.0
    warmup_lr: Amount = 0.0
    min_lr: Amount = 0.0
    base: Share = 0.25  # triangle
    fall: float = Field(default=0.25, gt=0, lt=1)  # triangle
    div: float = Field(default=25.0, ge=1)  # one-cycle, like the next three
    final_div: float = Field(default=1e4, ge=1)
    anneal: Literal["linear", "cosine"] = "cosine"
    momentum: tuple[Fraction, Fraction] | None = (0.85, 0.95)  # beta1 (or SGD's momentum) at the peak and at both ends


class BatchRamp(Strict):
    """Batches that grow linearly from `start` samples to `batch`, in multiples of `start`, until `until` (a fraction of
    all steps, or a length).
    """

    start: Count
    until: Warmup


class Ema(Strict):
    """Exponential moving average of the weights (timm's ModelEmaV3), which is then evaluated and exported."""

    decay: float = Field(default=0.9999, gt=0, lt=1)
    warmup: bool = False  # let the decay grow with the steps


class Distill(Strict):
    """Distillation from a teacher: `source` is the model that this one was cut from; otherwise a model folder.

    loss = task + `logits` * temperature^2 * KL(teacher, student) + `hidden` * mean squared error of hidden states. A
    layer's target is the teacher's state after the last layer that it replaces. `relative` divides each error by the
    teacher's mean square, so that layers of any scale count alike.
    """

    teacher: str = "source"
    logits: Amount = 1.0
    hidden: Amount = 0.0
    relative: bool = False
    temperature: Positive = 1.0


class Lora(Strict):
    """Low-rank adapters (Hu et al., 2021) in every linear layer of the blocks; the saved model is merged. `alpha`
    defaults to twice the rank.
    """

    rank: Count
    alpha: Positive | None = None
    dropout: Fraction = 0.0


class EarlyStopping(Strict):
    """End after `patience` evaluations in a row that did not improve the best metric by more than `min_delta`."""

    patience: Count
    min_delta: Amount = 0.0


class Checkpoint(Strict):
    """The checkpoints that an interrupted run resumes from, and which models are kept."""

    every: DurationText = "15m"
    keep_last: Count = 2  # checkpoints of an unfinished run; a finished one keeps none
    keep_best: bool = True  # model/ is the best of all evaluations; otherwise that of the last step
    keep_start: bool = False  # include the model before the first step: the result is never worse than the start


class Eval(Strict):
    """When to evaluate besides the end, and the batch size (without effect on results). `test`: read the test split
    once, at the very end, if the task has one; nothing is chosen by it. `samples`: at most this many, evenly spread; by
    default a timed training takes as many as it has time for, others take all.
    """

    every: DurationText = "1ep"
    batch: Count = 256
    at_start: bool = True
    test: bool = True
    samples: Count | None = None


class Train(Strict):
    """One training: how long, in what batches, with which optimizer."""

    duration: DurationText
    batch: Count  # samples per optimizer step, over all processes
    # at most this many per process and forward pass; None: no limit
    micro_batch: Count | None = None
    batch_ramp: BatchRamp | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False  # torch.compile
    activation_checkpointing: bool = False  # less memory, about a third more time
    parallel: Literal["ddp", "fsdp2"] = "ddp"  # each process holds the whole model, or a shard of every weight
    workers: int = Field(default=0, ge=0)  # data worker processes, per training process
    optim: Optim
    schedule: Schedule = Schedule()
    clip_grad: Amount = 1.0  # largest gradient norm; 0 = off
    dropout: Fraction | None = None  # rate of every dropout layer in this training; None: as in the model's config
    frozen_embeddings: bool = False  # do not train what is before the first block
    frozen_blocks: int = Field(default=0, ge=0)  # do not train this many first blocks, nor what is before them
    drop_path: Fraction = 0.0  # stochastic depth of the last block, linear from 0 at the first (XCiT, CaiT: of all)
    mixup: Amount = 0.0  # alpha; 0 = off
    cutmix: Amount = 0.0  # alpha; 0 = off
    mixup_prob: Share = 1.0  # of mixing a batch at all
    switch_prob: Share = 0.5  # of cutmix if both are on
    label_smoothing: Fraction = 0.0
    ema: Ema | None = None
    distill: Distill | None = None
    lora: Lora | None = None
    new_tokenizer: bool = False  # another tokenizer than the checkpoint's: new embeddings
    new_head: bool = False  # other classes than the checkpoint's, even if there are as many
    sparse_prediction: bool = True  # masked-lm: the head at masked tokens only; the same loss in less time
    early_stopping: EarlyStopping | None = None
    checkpoint: Checkpoint = Checkpoint()
    nan: Literal["stop", "skip", "rollback"] = "stop"  # what to do when a loss or gradient is not finite
    eval: Eval = Eval()
    # optimizer steps between two readings of the loss (each synchronizes with the device)
    log_every: Count = 10
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()  # besides metrics.jsonl
    seed: Seed = 0
    # Training data: shuffled in every epoch; shuffled in batches of similar length; or as stored.
    order: Literal["shuffled", "by-length", "as-stored"] = "shuffled"

    @model_validator(mode="after")
    def _numbers_fit(self) -> Train:
        if self.schedule.min_lr > self.optim.lr:
            raise ValueError(f"schedule.min_lr {self.schedule.min_lr:g} is above optim.lr {self.optim.lr:g}")
        if self.schedule.min_lr and self.schedule.name not in ("cosine", "linear"):
            end = {"one-cycle": "final_div says where it ends", "triangle": "it ends at 0"}
            why = end.get(self.schedule.name, "it stays at optim.lr")
            raise ValueError(f"schedule.min_lr is of cosine and linear; of {self.schedule.name} {why}")
        if self.schedule.warmup_lr > self.optim.lr:
            raise ValueError(f"schedule.warmup_lr {self.schedule.warmup_lr:g} is above optim.lr {self.optim.lr:g}")
        ramp, timed = self.batch_ramp, parse_duration(self.duration).seconds is not None
        if ramp and (ramp.start > self.batch or self.batch % ramp.start):
            raise ValueError(f"batch_ramp.start {ramp.start} does not divide batch {self.batch}")
        if ramp and isinstance(ramp.until, str) and parse_duration(ramp.until).seconds:
            raise ValueError("batch_ramp.until is a fraction, epochs or steps; a time would not be reproducible")
        if ramp and timed and not isinstance(ramp.until, str):
            raise ValueError("batch_ramp.until must have a unit (5ep, 500st) where the duration is a time")
        warmup = self.schedule.warmup
        if isinstance(warmup, str) and (parse_duration(warmup).seconds is not None) != timed:
            raise ValueError(f"schedule.warmup {warmup} and duration {self.duration} must both be times, or neither")
        return self

    @property
    def order_seed(self) -> int | None:
        """The seed of the training data's order; None if it is as stored."""
        return None if self.order == "as-stored" else self.seed

    @property
    def mixes(self) -> bool:
        """Whether samples of a batch are mixed with each other."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mixup_prob > 0


def _name(given: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", given):
        raise ValueError(f"a name has letters, digits, `_`, `.` and `-`, since folders bear it, and {given!r} is none")
    return given


Name = Annotated[str, AfterValidator(_name)]


class Kappa(Strict):
    """Condition number of attention blocks at the end and, with `every`, during training; `probes: 0` skips the
    Jacobian.
    """

    kind: ClassVar[str] = "kappa"
    samples: Count = 64
    every: Counted | None = None
    probes: int = Field(default=16, ge=0)


class Heads(Strict):
    """How many heads could be pruned, at the end and, with `every`, during training."""

    kind: ClassVar[str] = "heads"
    samples: int = Field(default=256, ge=2)
    every: Counted | None = None
    steps: int = Field(default=10, ge=1, le=100)


class Measure(Strict):
    """What is measured on the trained model besides the task metric. `kappa: null` leaves it out."""

    kappa: Kappa | None = Kappa()
    heads: Heads | None = None


class TaskChoice(BaseModel):
    """`name` of a task and, flat beside it, the options of that task (checked by `leansurgeon.tasks`)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> JsonObject:
        return dict(self.model_extra or {})


class TrainingRecipe(Strict):
    """`kind: training`: a task and how to train on it."""

    version: Literal[1] = 1
    name: Name
    kind: Literal["training"] = "training"
    task: TaskChoice
    train: Train
    measure: Measure | None = Measure()
    expected: JsonObject | None = None


class Arm(Strict):
    """One arm of an experiment: its shape, or the arm that it is the control of. `{}` is the source itself."""

    heads: int | str | None = None  # a number, 2x, or one per stage: "16,32,32,32"
    layers: int | str | None = None
    head_dim: int | Literal["auto", "keep", "split"] | None = None
    mlp_dim: int | str | None = None
    mlp_ratio: float | str | None = None  # a number, or one per stage
    init: Literal["transfer", "fresh", "fresh-attention"] | None = None
    control_of: str | None = None
    match: Literal["parameters", "flops"] | None = None  # what a control's MLP is solved for; None: parameters
    task: JsonObject | None = None  # task options that differ for this arm (and its control)
    train: JsonObject | None = None  # training settings that differ for this arm alone
    # How to transfer, as in `shrink`; it calibrates on the experiment's own training data.
    method: str | None = None
    more_heads: Literal["add", "split"] | None = None
    calibrate: bool | None = None
    heal: Literal["none", "closed", "local"] | None = None

    @property
    def changes_shape(self) -> bool:
        return any(
            value is not None for value in (self.heads, self.layers, self.head_dim, self.mlp_dim, self.mlp_ratio)
        )


class ExperimentRecipe(Strict):
    """`kind: experiment`: one source, several arms, several seeds, the same training."""

    version: Literal[1] = 1
    name: Name
    kind: Literal["experiment"]
    source: str
    source_config: JsonObject = Field(default={})
    seeds: list[Seed] = Field(default=[0], min_length=1)
    cut_from: Literal["original", "source"] = "original"  # the trained original, or the source as it is
    rates: list[Positive] = []  # learning rates: each arm tries all briefly and keeps its best
    task: TaskChoice
    train: Train
    retrain: JsonObject = Field(default={})  # merged over `train` for arms that start from transferred weights
    measure: Measure | None = Measure()
    arms: dict[str, Arm] = Field(min_length=1)
    expected: JsonObject | None = None
    debug: JsonObject | None = None  # merged over the whole recipe by --debug

    @field_validator("arms", mode="before")
    @classmethod
    def _empty_arm(cls, arms: Any) -> Any:
        """Read `original:` without a value as `{}`."""
        return {name: {} if arm is None else arm for name, arm in arms.items()} if isinstance(arms, dict) else arms

    @field_validator("arms", mode="after")
    @classmethod
    def _arms_go_together(cls, arms: dict[str, Arm]) -> dict[str, Arm]:
        for name, arm in arms.items():
            if arm.task and arm.init != "fresh":
                raise ValueError(f"arm {name!r} has a task of its own, so it cannot start from the original's weights")
            other = arm.control_of
            if other is None:
                if arm.match:
                    raise ValueError(f"arm {name!r} matches {arm.match} of no arm: it says no control_of")
                continue
            if arm.changes_shape:
                raise ValueError(
                    f"arm {name!r} is a control: its shape follows from {other!r}, so it names none itself"
                )
            if other not in arms or not arms[other].changes_shape:
                raise ValueError(f"arm {name!r} is a control of {other!r}, which is not an arm with a shape of its own")
        return arms

    @model_validator(mode="after")
    def _rates_need_starts(self) -> ExperimentRecipe:
        if self.rates and self.cut_from == "original":
            raise ValueError("`rates` are tried before anything is trained, so they need `cut_from: source`")
        return self

    def own_task(self, arm: str) -> JsonObject:
        """Return the task options in which an arm differs; a control has those of the arm that it controls."""
        return self.arms[self.arms[arm].control_of or arm].task or {}

    def task_of(self, arm: str) -> TaskChoice:
        """Return the task of an arm."""
        return TaskChoice.model_validate(merge(self.task.model_dump(), self.own_task(arm)))

    def training(self, *, transferred: bool, arm: str | None = None) -> TrainingRecipe:
        """Return the training of an arm: `train`, then `retrain` where weights were transferred, then the arm's own
        settings, merged in this order.
        """
        merged = merge(self.train.model_dump(), self.retrain if transferred else {})
        merged = merge(merged, (self.arms[arm].train or {}) if arm else {})
        return TrainingRecipe(
            name=self.name,
            task=self.task_of(arm) if arm else self.task,
            train=Train.model_validate(merged),
            measure=self.measure,
            expected=self.expected,
        )


Recipe = TrainingRecipe | ExperimentRecipe


def merge(base: Any, over: Any) -> Any:
    """Merge `over` into `base`, mapping by mapping; anything else is replaced. Neither argument changes."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merge(base[key], value) if key in base else value for key, value in over.items()}
