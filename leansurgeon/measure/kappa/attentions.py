"""The attentions of a loaded model, by the roles of their tensors: which modules read a block's input, which weights
are q, k, v and o. Names in memory differ from those in the declaration; the library's own `save_pretrained` tells which
is which. Imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.checkpoints.blockwise.file_names import names_in_files
from leansurgeon.checkpoints.pieces import ATTENTION_ROLES, Array, to_pieces
from leansurgeon.errors import UnsupportedModel
from leansurgeon.measure.kappa.blocks import Measured
from leansurgeon.shape import Stage


@dataclass(frozen=True)
class AttentionModule:
    """One attention of a loaded model; `tensors` are its matrices by their names in memory."""

    projection: str
    stage: Stage
    tensors: dict[str, TensorSpec]

    @property
    def readers(self) -> list[str]:
        """The modules that make queries, keys and values of the block's input."""
        return [name.rpartition(".")[0] for name, spec in self.tensors.items() if spec.role != "o"]


def of(loaded: Measured) -> list[AttentionModule | None]:
    """One for every entry of `loaded.projections`; None where its tensors do not make `softmax(q k) v` and an output
    projection.
    """
    architecture = loaded.architecture
    try:
        files = names_in_files(loaded.model, architecture.library)
    except UnsupportedModel:
        return [None for _ in loaded.projections]

    def bare(name: str) -> str:
        """Without the prefix of the base model, which files of other classes write or leave out."""
        return name.removeprefix(next((p for p in architecture.prefixes if p and name.startswith(p)), ""))

    memory = {bare(file): name for name, file in files.items()}
    shape = architecture.shape(loaded.config)
    groups: dict[tuple[int, int], dict[str, TensorSpec]] = {}
    for spec in architecture.tensors(loaded.config):
        if spec.layer is None or spec.role not in (*ATTENTION_ROLES, "o") or len(spec.shape) < 2:
            continue
        if (name := memory.get(bare(spec.name))) is not None:
            groups.setdefault((spec.layer, spec.group), {})[name] = spec
    by_path = {}
    for tensors in groups.values():
        letters = "".join(sorted(letter for spec in tensors.values() for letter in spec.role))
        output = next((name for name, spec in tensors.items() if spec.role == "o"), None)
        if letters == "koqv" and output:
            stage = shape.stages[next(iter(tensors.values())).stage]
            by_path[output.rpartition(".")[0]] = AttentionModule(output.rpartition(".")[0], stage, tensors)
    return [by_path.get(name) for name in loaded.projections]


def matrices(loaded: Measured, attention: AttentionModule) -> dict[str, Array] | None:
    """q (heads, head_dim, width), k and v (kv_heads, head_dim, width), o (width, heads, head_dim) in float64; None
    where the library holds them in other sizes than the declaration says.
    """
    state, pieces = loaded.model.state_dict(), {}
    for name, spec in attention.tensors.items():
        values = state[name].detach().double().cpu().numpy()
        if values.shape != spec.shape:
            return None
        pieces |= to_pieces(spec, values, attention.stage)
    return pieces
