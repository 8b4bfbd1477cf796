"""Condition numbers of attention's weight matrices, and of the products that a change of basis cannot alter.

W_q, W_k, W_v and W_o depend on the basis of every head: W_v -> R W_v with W_o -> W_o R^-1 is the same model. Values
reach the output only through W_o W_v, and queries meet keys in W_q^T W_k; the kappa of these products, sigma_1 /
sigma_d over the head_dim values that can differ from zero, belongs to the function. With rotary positions or norms
between queries and keys, W_q^T W_k does not describe them fully.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.checkpoints.blockwise.names import bare_name, file_names
from leansurgeon.checkpoints.model import Loaded
from leansurgeon.checkpoints.pieces import ATTENTION_ROLES, to_pieces
from leansurgeon.errors import UnsupportedModel
from leansurgeon.measure.kappa.figures import median_or_bound
from leansurgeon.measure.kappa.spectrum import kappa_above, noise_floor, spectrum
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import Stage

FP32 = torch.finfo(torch.float32).eps


# -- the attentions of a loaded model, by the roles of their tensors -------------------------------------------------


@dataclass(frozen=True)
class AttentionModule:
    """One attention of a loaded model; `tensors` are its matrices by their names in memory."""

    projection: str
    stage: Stage
    tensors: dict[str, TensorSpec]

    @property
    def readers(self) -> list[str]:
        """Modules that compute queries, keys and values from the block's input."""
        return [name.rpartition(".")[0] for name, spec in self.tensors.items() if spec.role != "o"]


def find_attentions(loaded: Loaded) -> list[AttentionModule | None]:
    """Return one for every entry of `loaded.projections`; None if its tensors do not form `softmax(q k) v` with an
    output projection. Names in memory differ from those in the declaration; the library's own `save_pretrained` maps
    them.
    """
    architecture = loaded.architecture
    try:
        files = file_names(loaded.model, architecture.library)
    except UnsupportedModel:
        return [None for _ in loaded.projections]

    memory = {bare_name(saved[0], architecture): name for name, saved in files.items()}
    shape = architecture.shape(loaded.config)
    groups = {}
    for spec in architecture.tensors(loaded.config):
        if spec.layer is None or spec.role not in (*ATTENTION_ROLES, "o") or len(spec.shape) < 2:
            continue
        if (name := memory.get(bare_name(spec.name, architecture))) is not None:
            groups.setdefault((spec.layer, spec.group), {})[name] = spec
    by_path = {}
    for tensors in groups.values():
        letters = "".join(sorted(letter for spec in tensors.values() for letter in spec.role))
        output = next((name for name, spec in tensors.items() if spec.role == "o"), None)
        if letters == "koqv" and output:
            stage = shape.stages[next(iter(tensors.values())).stage]
            by_path[output.rpartition(".")[0]] = AttentionModule(output.rpartition(".")[0], stage, tensors)
    return [by_path.get(name) for name in loaded.projections]


# -- their condition numbers -------------------------------------------------------------------------------------------


def weights(loaded: Loaded, modules: list[AttentionModule | None]) -> list[JsonObject | None]:
    """Return for every attention `q`, `k`, `v`, `o` (whole matrices) and the median over heads of `vo` and `qk`, with
    the number of heads whose product is rank-deficient. None if the weights have no such form.

    A figure is `{"value": x, "lower_bound": null}`, or the other way round if the rank is not full.
    """
    found = []
    state = loaded.model.state_dict()
    for attention in modules:
        # q (heads, head_dim, width), k and v (kv_heads, head_dim, width), o (width, heads, head_dim) in float64
        m = {}
        for name, spec in attention.tensors.items() if attention else ():
            values = state[name].detach().double().cpu().numpy()
            if values.shape == spec.shape:  # skip tensors whose size in memory differs from the declaration
                m |= to_pieces(spec, values, attention.stage)
        if len(m) < 4:
            found.append(None)
            continue
        width, heads, _ = m["o"].shape
        each = heads // m["k"].shape[0]
        k, v = (np.repeat(m[name], each, axis=0) for name in ("k", "v"))
        out = m["o"].transpose(1, 0, 2)  # (heads, width, head_dim)
        flat = {name: m[name].reshape(-1, width) for name in ("q", "k", "v")} | {"o": m["o"].reshape(width, -1)}
        products = {"vo": over_heads(out, v), "qk": over_heads(m["q"].transpose(0, 2, 1), k)}
        found.append({name: figure(*of_matrix(values)) for name, values in flat.items()} | products)
    return found


def of_matrix(values: ndarray) -> tuple[float, float]:
    """Return (kappa or infinity, lower bound) of one matrix that is stored in fp32."""
    sigma = spectrum(torch.from_numpy(np.ascontiguousarray(values))[None])[0]
    return kappa_above(sigma, len(sigma), noise_floor(sigma, *values.shape, FP32))[:2]


def over_heads(left: ndarray, right: ndarray) -> JsonObject:
    """Return the median over heads of kappa(left @ right), (heads, n, d) and (heads, d, m), without forming the
    products: the singular values are those of a d x d core between two QR factors.
    """
    d, n, m = right.shape[1], left.shape[1], right.shape[2]
    if d > min(n, m):  # the product is smaller than its factors
        core, most = torch.from_numpy(left @ right), min(n, m)
    else:
        factors = (torch.from_numpy(np.ascontiguousarray(x)) for x in (left, right.swapaxes(1, 2)))
        first, second = (torch.linalg.qr(x)[1] for x in factors)
        core, most = first @ second.mT, d
    pairs = [kappa_above(s, most, noise_floor(s, n, m, FP32))[:2] for s in torch.linalg.svdvals(core)]
    lost = sum(not math.isfinite(value) for value, _ in pairs)
    value, bound = median_or_bound(*zip(*pairs, strict=True))
    worst = None if lost else max(value for value, _ in pairs)
    return {"value": value, "lower_bound": bound, "worst": worst, "deficient": lost}


def figure(value: float, bound: float) -> JsonObject:
    """Return a matrix's kappa for JSON: a bound instead of infinity."""
    return {"value": value, "lower_bound": None} if math.isfinite(value) else {"value": None, "lower_bound": bound}
