"""Where a training stands on its schedule: at the step itself, or where the duration is a time, at the clock.

A timed training would have to look at the clock at every step and agree on it with the other processes. Instead rank 0
looks now and then, and between two looks the clock is taken to go on as it did: what happens at a step is a function of
the step and of the last look, the same on every process.
"""

from __future__ import annotations

from dataclasses import dataclass

from leansurgeon.training.plan import TICKS, Plan


@dataclass
class Pace:
    """`seconds` were spent when `step` steps were done, and a step takes `per_step` seconds."""

    plan: Plan
    step: int = 0
    seconds: float = 0.0
    per_step: float = 0.0

    def look(self, step: int, seconds: float) -> None:
        """Take over what rank 0 read: `seconds` of training, evaluations included, after `step` steps."""
        if step > self.step:
            self.per_step = max(0.0, seconds - self.seconds) / (step - self.step)
        self.step, self.seconds = step, seconds

    def place(self, step: int) -> float:
        """The argument of `Plan.lr` for optimizer step `step`."""
        return TICKS * self.fraction(step) if self.plan.timed else float(step)

    def fraction(self, step: int) -> float:
        """How much of the training is over before step `step`, from 0 to 1."""
        if not self.plan.timed:
            return min(1.0, step / self.plan.steps)
        return min(1.0, (self.seconds + (step - self.step) * self.per_step) / self.plan.seconds)

    def over(self, done: int) -> bool:
        """Whether the training ends after `done` steps; a timed one does at least one step."""
        return self.fraction(done) >= 1.0 and done > 0 if self.plan.timed else done >= self.plan.steps

    def state(self) -> dict[str, float]:
        return {"step": self.step, "seconds": self.seconds, "per_step": self.per_step}

    def restore(self, state: dict[str, float]) -> None:
        self.step, self.seconds, self.per_step = int(state["step"]), state["seconds"], state["per_step"]
