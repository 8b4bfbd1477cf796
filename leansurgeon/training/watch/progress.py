"""What a person sees while training, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from leansurgeon.progress import Screen, duration_text, rate_text


class Progress(Screen):
    """The line of a training of `steps` steps (None: a clock ends it)."""

    def __init__(
        self,
        steps: int | None,
        say: Callable[[str], None] | None = None,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(say, quiet=quiet, stream=stream, clock=clock)
        self.steps = steps

    def step(
        self,
        done: int,
        *,
        loss: float,
        lr: float,
        rate: float,
        unit: str,
        eta: float,
        mfu: float | None = None,
        waiting: float | None = None,
        memory: int | None = None,
        fraction: float | None = None,
    ) -> None:
        """Show the state after `done` steps: `rate` in `unit`, `eta` in seconds, `mfu` and `waiting` (for data) as
        shares, `memory` in bytes; `fraction` of the training is shown where its steps are not known (`steps` is None).
        """
        if self.quiet:
            return
        where = f"{done}/{self.steps}" if self.steps is not None else f"{done} ({100 * (fraction or 0):.1f} %)"
        parts = [f"step {where}", f"loss {loss:.4f}", f"lr {lr:.2e}", rate_text(rate, unit)]
        parts += [f"mfu {100 * mfu:.0f} %"] if mfu is not None else []
        parts += [f"data {100 * waiting:.0f} %"] if waiting is not None else []
        parts += [f"{memory / 1e9:.2f} GB"] if memory else []
        share = done / self.steps if self.steps else fraction
        self.show("  ".join([*parts, f"eta {duration_text(eta)}"]), share, always=done == self.steps)
