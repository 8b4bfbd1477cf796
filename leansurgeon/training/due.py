"""What comes after a step, as one value that all processes agree on: a look at the losses, a measure, an evaluation, a
checkpoint.

Most of it follows from the recipe and the number of the step. What a clock decides is read from that of rank 0, at a
look.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from leansurgeon.training.recipe.durations import parse_duration
from leansurgeon.training.state import Run
from leansurgeon.training.watch import guards, measures


@dataclass(frozen=True)
class Due:
    """What comes after a step, in this order."""

    look: bool = False
    measure: bool = False
    evaluate: bool = False
    save: bool = False

    @property
    def pause(self) -> bool:
        """Whether something comes that is no part of the steps."""
        return self.measure or self.evaluate or self.save

    def at_end(self) -> Due:
        """After the last step: it is evaluated; what else is wanted then, `finish` does."""
        return replace(self, measure=False, evaluate=True, save=False)


def after_step(run: Run) -> Due:
    """What the recipe wants after the step that was just done, and a look where any of it needs one."""
    train, done = run.recipe.train, run.history.done
    save, measure = run.plan.due(train.checkpoint.every, done), measures.due(run, done)
    evaluate = run.plan.evaluate_after(done)
    look = evaluate or done % train.log_every == 0 or run.trainer.pace.over(done)
    # A timed training does not know how long a step takes, and stays at the start of its schedule until it does.
    look = look or (run.plan.timed and done < train.log_every and done.bit_count() == 1)
    # A look raises then; nothing spoilt is saved or measured.
    look = look or ((save or measure) and not guards.sound(run.window.rows, run.trainer))
    return Due(look, measure, evaluate, save)


def by_clock(run: Run, due: Due, step_seconds: float) -> Due:
    """`due`, with the evaluation and the checkpoint that the clock of rank 0 asks for. Sets the pace of a timed
    training, too. To be called by all processes, at a look.
    """
    train, now = run.recipe.train, time.perf_counter()
    evaluation, saving = (parse_duration(text).seconds for text in (train.eval.every, train.checkpoint.every))
    run.stops.pace(step_seconds)
    if evaluation is None and saving is None and not run.plan.timed:
        return due
    evaluate = evaluation is not None and now - run.evaluated_at >= evaluation
    save = saving is not None and now - run.saved_at >= saving
    evaluate, save, spent = run.council.of_main([float(evaluate), float(save), run.spent()])
    if run.plan.timed:
        run.trainer.pace.look(run.history.done, spent)
    return replace(due, evaluate=due.evaluate or bool(evaluate), save=due.save or bool(save))
