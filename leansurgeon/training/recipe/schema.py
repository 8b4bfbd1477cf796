"""Recipes: YAML files that describe a training (`TrainingRecipe`) or an experiment (`ExperimentRecipe`). No torch.

Every key is known or refused. What may stand under `train` is in `settings`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from leansurgeon.training.recipe.durations import Counted
from leansurgeon.training.recipe.settings import Seed, Strict, Train


def _name(given: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", given):
        raise ValueError(f"a name has letters, digits, `_`, `.` and `-`, since folders bear it, and {given!r} is none")
    return given


Name = Annotated[str, AfterValidator(_name)]


class Kappa(Strict):
    """Conditioning of attention at the end and, with `every`, on the way; `probes: 0` leaves the Jacobian out."""

    kind: ClassVar[str] = "kappa"
    samples: int = Field(default=64, ge=1)
    every: Counted | None = None
    probes: int = Field(default=16, ge=0)


class Heads(Strict):
    """How many heads could go, at the end and every so often."""

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
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainingRecipe(Strict):
    """`kind: training`: a task and how to train on it."""

    version: Literal[1] = 1
    name: Name
    kind: Literal["training"] = "training"
    task: TaskChoice
    train: Train
    measure: Measure | None = Measure()
    expected: dict[str, Any] | None = None


class Arm(Strict):
    """One row of an experiment: the wanted shape, or the arm whose control this is. `{}` is the source itself."""

    heads: int | str | None = None  # a number, 2x, or one per stage: "16,32,32,32"
    layers: int | str | None = None
    head_dim: int | Literal["auto", "keep", "split"] | None = None
    mlp_dim: int | str | None = None
    mlp_ratio: float | str | None = None  # a number, or one per stage
    init: Literal["transfer", "fresh", "fresh-attention"] | None = None
    control_of: str | None = None
    match: Literal["parameters", "flops"] | None = None  # what a control's MLP is solved for; None: parameters
    task: dict[str, Any] | None = None  # options of the task that are others for this arm (and for its control)
    train: dict[str, Any] | None = None  # settings of the training that are others for this arm alone
    # How a transfer is made, as `shrink` has it; it calibrates on the experiment's own training data.
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
    source_config: dict[str, Any] = Field(default={})
    seeds: list[Seed] = Field(default=[0], min_length=1)
    task: TaskChoice
    train: Train
    retrain: dict[str, Any] = Field(default={})  # merged over `train` for arms that start from transferred weights
    measure: Measure | None = Measure()
    arms: dict[str, Arm] = Field(min_length=1)
    expected: dict[str, Any] | None = None
    debug: dict[str, Any] | None = None  # merged over the whole recipe by --debug

    @field_validator("arms", mode="before")
    @classmethod
    def _empty_arm(cls, arms: Any) -> Any:
        """`original:` with nothing behind it means `{}`."""
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

    def own_task(self, arm: str) -> dict[str, Any]:
        """Options of the task in which an arm differs; a control has the task of the arm that it controls."""
        return self.arms[self.arms[arm].control_of or arm].task or {}

    def task_of(self, arm: str) -> TaskChoice:
        """The task of an arm."""
        return TaskChoice.model_validate(merge(self.task.model_dump(), self.own_task(arm)))

    def training(self, *, transferred: bool, arm: str | None = None) -> TrainingRecipe:
        """The training of an arm: `train`, with `retrain` merged over it where weights were transferred, and what the
        arm itself says over both.
        """
        merged = merge(self.train.model_dump(), self.retrain) if transferred else self.train.model_dump()
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
    """`over` laid upon `base`, mapping by mapping; what is no mapping is replaced. Neither argument changes."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merge(base[key], value) if key in base else value for key, value in over.items()}
