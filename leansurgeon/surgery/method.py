"""How to carry out a plan where there is a choice; built from the options of `shrink`.

init     transfer keeps as much as possible; fresh initializes the whole model (as in the paper); fresh-attention
         keeps everything except q, k and v where head_dim changes
layers   how the layers to keep are chosen; auto takes the best of several sets by calibration data, or without data
         evenly spaced ones including both ends
heal     none; closed refits output projections; local then fits the blocks around every cut together, in a growing span
more     how heads of the same size are added: `add` (new heads with zero output) or `split` (children of the old ones)
"""

from __future__ import annotations

from dataclasses import dataclass

from leansurgeon.errors import UsageError, did_you_mean

# Ways to choose layers, and whether each needs calibration data.
LAYERS = {
    "auto": False,
    "even": False,
    "first-of-each": False,
    "last-of-each": False,
    "influence": True,
    "angular": True,
}
HEALS = ("none", "closed", "local")
INITS = ("transfer", "fresh", "fresh-attention")


@dataclass(frozen=True)
class Method:
    """`keep` lists the layers to keep (`0,2,4-9`) instead of choosing them. `heal` selects how calibration data heals,
    `heal_time` limits the local fit (seconds), `balance` changes the basis of values and outputs. `uncalibrated`
    accepts a split of heads based on the weights alone.
    """

    layers: str = "auto"
    keep: str | None = None
    more: str = "add"
    heal: str = "local"
    balance: bool = False
    uncalibrated: bool = False
    heal_time: float | None = None

    @property
    def kept(self) -> tuple[int, ...] | None:
        """Layers named by `keep` (`0,2,4-9`), counted from 0 through all stages. Raises `UsageError`."""
        if self.keep is None:
            return None
        layers = []
        for word in self.keep.split(","):
            first, dash, last = word.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise UsageError(f"--keep {self.keep}: layer numbers are needed, such as 0,2,4-9.")
            if dash and int(last) < int(first):
                raise UsageError(f"--keep {self.keep}: {word.strip()} runs backwards.")
            if len(last or first) > 5:
                raise UsageError(f"--keep {self.keep}: no model has {last or first} layers.")
            layers += range(int(first), int(last or first) + 1)
        if layers != sorted(set(layers)):
            raise UsageError(f"--keep {self.keep}: every layer once, in ascending order.")
        return tuple(layers)

    @property
    def refits(self) -> bool:
        """Whether weights are refitted after a cut."""
        return self.heal != "none"

    @property
    def grows(self) -> bool:
        """Whether blocks are trained locally after the refit."""
        return self.heal == "local"

    def check(self, calibrated: bool) -> None:
        """Reject impossible combinations before a source is opened. Raises `UsageError`."""
        if self.layers not in LAYERS:
            raise UsageError(
                f"--method {self.layers}{did_you_mean(self.layers, LAYERS)}: give one of {', '.join(LAYERS)}."
            )
        if self.more not in ("add", "split"):
            raise UsageError(f"--more-heads {self.more}: give add or split.")
        if self.keep is not None and self.layers != "auto":
            raise UsageError(f"--keep says which layers stay, and --method {self.layers} chooses them; give one.")
        if self.heal not in HEALS:
            raise UsageError(f"--heal {self.heal}{did_you_mean(self.heal, HEALS)}: give one of {', '.join(HEALS)}.")
        if self.heal_time is not None and not self.grows:
            raise UsageError(f"--heal-time is for a local fit, and --heal {self.heal} does none.")
        if calibrated and self.uncalibrated:
            raise UsageError("--calibrate and --uncalibrated exclude each other.")
        if LAYERS[self.layers] and not calibrated:
            raise UsageError(f"--method {self.layers} needs sample data.", "Add --calibrate DATA.")
        _ = self.kept
