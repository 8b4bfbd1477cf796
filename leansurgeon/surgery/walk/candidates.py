"""Which sets of layers, healed in which way, calibrated surgery tries against each other.

First the sets of layers compete, each with the refit of the MLP's output at its cuts: there it matters most. Then ways
of healing compete for the best set, since each helps some models and hurts others: the attention's output projection
refitted before the MLP's at the cuts, and the MLP's output refitted in all layers behind the first cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from leansurgeon.checkpoints.recorded.decided import GuardScore, Tried
from leansurgeon.checkpoints.recorded.part import Part


@dataclass(frozen=True)
class Candidate(Part):
    """Layers to keep, what chose them, and what is refitted beside the MLP's output at cuts."""

    kept: tuple[int, ...]
    criterion: str
    attention: bool = False  # the attention's output at cuts, too
    later: bool = False  # the MLP's output in every layer behind the first cut, too

    def tried(self, score: GuardScore, data: str, *, left_out: bool = False) -> Tried:
        """The candidate as the record has it, with its score on `data`."""
        return Tried(self.kept, self.criterion, self.attention, self.later, score, left_out=left_out, data=data)


def candidates(criterion: str, kept: Mapping[str, tuple[int, ...] | None]) -> list[Candidate]:
    """The sets of layers of a criterion; of `auto` all, each set once."""
    by_layers: dict[tuple[int, ...], Candidate] = {}
    for name, layers in kept.items():
        if layers and (criterion == "auto" or name == criterion):
            by_layers.setdefault(layers, Candidate(layers, name))
    return list(by_layers.values())


def ways(best: Candidate) -> list[Candidate]:
    """Ways of healing one set of layers. Later layers, which cost most, are refitted only together with the attention
    at the cuts, whose refit the block's guard has kept or refused.
    """
    return [best, replace(best, attention=True), replace(best, attention=True, later=True)]
