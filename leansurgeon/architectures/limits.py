"""What must not change in an architecture, and config keys that depend on which layers are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leansurgeon.architectures.tensors import Config
from leansurgeon.errors import UnsupportedModel, UsageError, quote
from leansurgeon.shape import Shape

NUMBERS = {"depth": ("depth",), "heads": ("heads", "head_dim", "kv_heads"), "mlp_dim": ("mlp_dim",)}
CANNOT = {"depth": "Layers cannot be dropped", "heads": "Heads cannot change", "mlp_dim": "The MLP cannot change"}
CAN = {"depth": "layers can be dropped", "heads": "heads can change", "mlp_dim": "the MLP can change"}
ALL_HEADS = "its query and key norms run over all heads"
# Config keys that name the outputs taken from a tower: by index of a hidden state (0 is before the first layer, -1
# after the last), or by the layer after which they are taken.
HIDDEN_STATES = ("vision_feature_layer", "vision_feature_layers")
ONCE_EACH = ("deepstack_visual_indexes",)
BEHIND_LAYERS = (*ONCE_EACH, "intermediate_layers_indices")
TAPS = HIDDEN_STATES + BEHIND_LAYERS
FROM_END = "num_kv_shared_layers"  # counts the last layers of a kind
BY_LAYER = "per_layer_config"  # settings of single layers, by layer index


def check_allowed(name: str, refused: Mapping[str, str], now: Shape, shape: Shape) -> None:
    """Raise `UnsupportedModel` if a number changes that must not, with the reason and with what may change."""
    for kind, reason in refused.items():
        pairs = zip(now.stages, shape.stages, strict=True)
        if any(getattr(a, number) != getattr(b, number) for a, b in pairs for number in NUMBERS[kind]):
            able = " and ".join(text for other, text in CAN.items() if other not in refused)
            raise UnsupportedModel(
                f"{CANNOT[kind]} in this {name}: {reason}.", f"{able[:1].upper()}{able[1:]}." if able else None
            )


def of_layers(key: str, values: object, layers: Sequence[int]) -> list[object]:
    """Return the entries of a per-layer list for the kept layers.

    Raises `UnsupportedModel` if it does not cover all layers.
    """
    if not isinstance(values, list | tuple) or len(values) <= max(layers):
        raise UnsupportedModel(f"The config says {key} = {quote(values)}, which has no value for each layer.")
    return [values[i] for i in layers]


def follow_layers(
    c: Config, counters: Sequence[str], index_lists: Sequence[str], layers: Sequence[int], depth: int
) -> dict[str, object]:
    """Return what keys that count the first layers of a kind or list layers by index say of the kept `layers`."""
    changes = {}
    for key in counters:
        if isinstance(c.get(key), int) and c[key] < depth:
            changes[key] = sum(i < c[key] for i in layers)
    for key in index_lists:
        if isinstance(c.get(key), list):
            changes[key] = [layers.index(i) for i in c[key] if i in layers]
    if isinstance(c.get(FROM_END), int) and c[FROM_END] <= depth:
        changes[FROM_END] = sum(i >= depth - c[FROM_END] for i in layers)
    return changes | of_single_layers(c, layers)


def of_single_layers(c: Config, layers: Sequence[int]) -> Config:
    """Return the settings of single layers, renumbered for a model of these `layers`."""
    if not isinstance(of_some := c.get(BY_LAYER), dict):
        return {}
    own = {int(number): entry for number, entry in of_some.items()}
    return {BY_LAYER: {str(new): own[old] for new, old in enumerate(layers) if old in own}}


def move_taps(keys: Sequence[str], places: Sequence[Config], layers: Sequence[int] | None, depth: int) -> None:
    """Renumber the `TAPS` keys for the kept `layers` of the first stage, of `depth` layers.

    A key is in the first of the `places` that has it. If no layers were chosen yet (None), keys are only limited to
    `depth` layers: enough for counting parameters.
    """
    for key in keys:
        place = next(place for place in places if key in place)
        if layers is None:
            place[key] = within(place[key], depth if key in HIDDEN_STATES else depth - 1)
        else:
            place[key] = follow_taps(key, place[key], [i for i in layers if i < depth], depth)


def within(number: Any, last: int) -> Any:
    """Limit an index, or several, to at most `last`; -1 also means the last one."""
    if isinstance(number, list | tuple):
        return [within(n, last) for n in number]
    return max(-last - 1, min(last, number))


def follow_taps(key: str, value: int | Sequence[int], layers: Sequence[int], depth: int) -> int | list[int]:
    """Return the value of a key of `TAPS` when only these `layers` of `depth` are kept.

    What was taken after a layer is taken after the last kept layer up to it. Raises `UsageError` if there is none, or
    if each needs one of its own.
    """
    if isinstance(value, int):
        return _map_hidden_state(value, layers, depth)
    if key in HIDDEN_STATES:
        return [_map_hidden_state(number, layers, depth) for number in value]
    numbers_left = [sum(i <= number for i in layers) - 1 for number in value]
    if -1 in numbers_left or (key in ONCE_EACH and len(set(numbers_left)) < len(numbers_left)):
        raise UsageError(
            f"The model takes something behind each of the layers {', '.join(map(str, value))} ({key}), and too few "
            "are left for it.",
            "Keep these layers; --keep names the layers that stay.",
        )
    return numbers_left


def _map_hidden_state(number: int, layers: Sequence[int], depth: int) -> int:
    before = number if number >= 0 else depth + 1 + number  # number of layers before it
    left = sum(i < before for i in layers)
    return left if number >= 0 else left - len(layers) - 1
