"""What a candidate is judged by. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """A metric on held-out samples. `error` is its standard error where it is a share of `samples` that were right;
    `spread` is the standard deviation over seeds where there were several.
    """

    value: float
    label: str
    higher: bool
    percent: bool
    loss: float | None = None
    samples: int | None = None
    error: float | None = None
    spread: float | None = None

    @property
    def key(self) -> tuple[float, float]:
        """The smaller, the better: the metric, then the loss."""
        return (-self.value if self.higher else self.value), self.loss if self.loss is not None else 0.0

    @property
    def text(self) -> str:
        """The value as a person reads it."""
        return f"{100 * self.value:.1f} %" if self.percent else f"{self.value:.4g}"
