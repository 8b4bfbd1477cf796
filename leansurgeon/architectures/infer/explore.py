"""From a config to what is known of its family: build it small, change number by number, prove what will be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from leansurgeon.architectures.infer import cuts, divided, tiny, traits
from leansurgeon.architectures.infer.differences import (
    Axis,
    Level,
    Shapes,
    build_small_config,
    effect,
    fill_in_numbers,
    levels,
    numbers,
    shapes,
)
from leansurgeon.architectures.infer.finding import Finding, Part, Stage
from leansurgeon.architectures.infer.library import (
    FAILED,
    Library,
    Unbuildable,
    memory_names,
    quietly,
    whole,
)
from leansurgeon.architectures.infer.tiny import Config, aliases
from leansurgeon.architectures.infer.units import (
    Trial,
    UnitKind,
    conv1d,
    explain_axes,
    find_unreached,
    heads_kind,
    mlp_kind,
    of_stages,
    proof,
)
from leansurgeon.architectures.infer.widened import (
    HEAD_DIM,
    Heads,
    LeanLibrary,
    find_projection_units,
    lean_config,
    specs,
)
from leansurgeon.architectures.infer.words import StageNumbers, UnitPlace, head_words, mlp_words
from leansurgeon.architectures.towers import MORE_SECTIONS, SECTIONS


def fails(trouble: str | None) -> bool:
    """Whether a library did not do what was tried, so that nothing could be compared."""
    return trouble is not None and any(text in trouble for text in FAILED)


SHARED = "=1"  # the number 1 itself, in the place of a key


def sections_of(config: Mapping[str, Any], tower: str | None) -> list[str]:
    """The parts of a config that describe towers: the one asked for, or all, then the config itself, whose name is
    empty, and at last parts that are rarely towers of their own.
    """

    def there(keys: Iterable[str]) -> list[str]:
        return [k for k in keys if isinstance(config.get(k), dict)]

    if tower:
        return there((SECTIONS[tower], *MORE_SECTIONS.get(tower, ()))) or [""]
    return [*there(SECTIONS.values()), "", *there(k for keys in MORE_SECTIONS.values() for k in keys)]


def explore(config: Mapping[str, Any], tower: str | None = None) -> Finding:
    """Everything that is known of the family of a `config.json` afterwards. Never raises for what a library does."""
    with quietly(), torch.random.fork_rng(devices=[]):
        full = whole(config)
        library = Library.of(full)
        try:
            small = build_small_config(library, full)
        except Unbuildable as error:
            return Finding(full["model_type"], library.cls.__name__, (), f"no small model of it runs: {error}")
        best: Finding | None = None
        for section in sections_of(small, tower):
            part, own = (
                (replace(library, outer=small, section=section), small[section]) if section else (library, small)
            )
            finding = replace(Search(part, fill_in_numbers(part, own)).finding(), section=section)
            if finding.proven["depth"]:
                best = finding
                break
            best = best if best and not (best.trouble and finding.stages) else finding
        if tower and not best.section:
            best = replace(best, stages=(), trouble=f"it has no tower of its own for {tower}")
    return replace(best, model_type=full["model_type"])


@dataclass(frozen=True)
class Effect:
    """What a change of numbers does: growth of axes, by how much the number grew."""

    step: int
    axes: Mapping[Axis, int]


class Search:
    """One family while it is looked at; `config` is small. `divides`: heads of half the size are tried, too."""

    divides = True

    def __init__(self, library: Library, config: Config) -> None:
        self.library, self.config, self.names = library, config, aliases(config)
        self.base: Shapes = shapes(library, config)
        self.levels, self.troubles = levels(library, config)
        self.trial = Trial.of(library, config, levels=tuple(self.levels))
        self.memory = memory_names(library, self.trial.model)
        self.state_sizes = {n: tuple(t.shape) for n, t in self.trial.model.state_dict().items()}
        self.turned = conv1d(self.trial.model)
        self.known: dict[tuple, Effect | None] = {}
        self.joint: dict[
            str, tuple[dict[str, list[UnitPlace]], str | None]
        ] = {}  # of numbers that several stages share
        self.ratios: dict[str, tuple[dict[int, Part], str]] = {}

    def width(self, stage: Stage) -> int | None:
        """Channels of the stream through a stage."""
        return self.config.get(stage.width_key)

    def lean(self, spec: dict[str, Any], now: Heads) -> tuple[Library, Config]:
        """The library behind our modelling file and the config for it, with the heads that there are."""
        full, section = self.library.join_config(self.config), self.library.section
        config = lean_config(full, self.library.cls.__name__, [spec], {HEAD_DIM: now.head_dim}, section)
        library = LeanLibrary(self.library.cls, config if section else {}, section)
        return library, config[section] if section else config

    def finding(self) -> Finding:
        """The whole of it."""
        size = sum(p.numel() for p in self.trial.model.parameters())
        trouble = "" if self.levels else "; ".join(self.troubles) or "no list of blocks follows a number of the config"
        if trouble and isinstance(depths := self.config.get("depths"), list | tuple):
            trouble = f"its {len(depths)} stages differ in width, and only models of timm are cut in stages (timm/NAME)"
        stages = [self.stage(level) for level in self.levels]
        stages = [traits.describe_stage(self, stage, level) for stage, level in zip(stages, self.levels, strict=True)]
        stages = [
            replace(s, bases=divided.free_bases(self.trial, s, self.count_heads(s))) if s.standard else s
            for s in stages
        ]
        tables = dict(self.trial.model.named_buffers())
        return Finding(
            self.config["model_type"],
            self.library.cls.__name__,
            tuple(stages),
            trouble,
            parameters=size,
            causal=self.library.section in ("", "text_config") and traits.is_causal(self.trial),
            buffers=tuple(n for n, at in self.memory.items() if at in tables and not self.trial.locate(n)),
            inputs=tuple(sorted(self.trial.inputs)),
        )

    # -- numbers -------------------------------------------------------------------------------------

    def count_heads(self, stage: Stage) -> StageNumbers:
        """The numbers of a stage whose heads are known."""
        heads = self.config[stage.heads_key]
        kv = 1 if stage.kv_key == SHARED else self.config[stage.kv_key] if stage.kv_key else heads
        return StageNumbers(heads, kv, self.config.get(stage.head_dim_key) or self.width(stage) // heads, 1)

    def general(self, key: str) -> str:
        return self.names.get(key, key)

    def find_effect(self, **by: int) -> Effect | None:
        """The effect of numbers that grow together, by the first step that the library takes."""
        at = tuple(sorted(by))
        if at not in self.known:
            self.known[at] = None
            first = self.config[at[0]]
            for step in dict.fromkeys((1, 2, first)):
                changes = {key: self.config[key] + step * by[key] for key in at}
                axes = effect(self.library, self.config, self.base, changes)
                if axes is None and set(at) <= set(tiny.HEAD_DIMS):  # rotary positions may have to fit
                    turned = {k: tiny.rope(self.config[k], changes[at[0]]) for k in tiny.ROTARY if k in self.config}
                    axes = effect(self.library, self.config | turned, self.base, changes) if turned else None
                if axes is not None:
                    self.known[at] = Effect(step, axes)
                    break
        return self.known[at]

    def find_keys(self, names: tuple[str, ...], level: Level) -> list[str]:
        """Keys of such a name, those that share a word with the stage's depth first, then in the order of `names`."""
        keys = [k for k in numbers(self.config) if self.general(k) in names]
        side = next((s for s in ("encoder", "decoder") if s in level.key or f"{s}." in level.layer), "")
        other = {"encoder": "decoder", "decoder": "encoder"}.get(side, " ")
        keys = [k for k in keys if not k.startswith(other)] or keys
        return sorted(keys, key=lambda k: (not (side and k.startswith(side)), names.index(self.general(k))))

    def inside(self, effect: Effect | None, level: Level | None) -> dict[Axis, int]:
        """The part of an effect that lies in the blocks of a stage; of all stages where none is given."""
        number = self.levels.index(level) if level else None
        if effect is None:
            return {}
        placed = {at: self.trial.locate(at[0]) for at in effect.axes}
        return {at: effect.axes[at] for at, p in placed.items() if p and number in (None, p[0])}

    def is_shared(self, effect: Effect | None, level: Level) -> bool:
        """Whether an effect lies in the blocks of several stages, and nowhere else."""
        inside = self.inside(effect, None)
        return effect is not None and len(inside) == len(effect.axes) > len(self.inside(effect, level)) > 0

    # -- stages --------------------------------------------------------------------------------------

    def stage(self, level: Level) -> Stage:
        width = next(iter(self.find_keys(tiny.WIDTHS, level)), "hidden_size")
        stage = Stage(level.layer, level.key, width, level.lists, taps=level.taps)
        stage = self.with_heads(self.with_depth(stage, level), level)
        return self.with_mlp(stage, level)

    def with_depth(self, stage: Stage, level: Level) -> Stage:
        """Layers that can be dropped one by one, behind some that stay, or in groups where kinds take turns."""
        shared = next((n for n in self.library.tied_names(self.trial.model) if self.trial.locate(n)), None)
        if shared:
            return replace(stage, depth_trouble=f"its layers share weights ('{shared}')")
        trouble, first, last, group = cuts.droppable(self.library, self.config, level)
        return replace(stage, depth_trouble=trouble, stay=first, stay_last=last, period=group)

    # -- heads ---------------------------------------------------------------------------------------

    def with_heads(self, stage: Stage, level: Level) -> Stage:
        keys = self.find_keys(tiny.HEADS, level)
        if not keys:
            return replace(stage, heads_trouble="its config has no number of heads")
        key = keys[0]
        kv_key = next(iter(self.find_keys(tiny.KV_HEADS, level)), None)
        heads = self.config[key]
        kv = self.config[kv_key] if kv_key else heads
        stage = replace(stage, heads_key=key, kv_key=kv_key)
        plain = kv == heads
        effect = self.find_effect(**({key: 1, kv_key: 1} if plain and kv_key else {key: kv if not plain else 1}))
        axes = self.inside(effect, level)
        shared = self.is_shared(effect, level)
        head_dim_key = self.head_dim_key(level, heads, axes)
        inner = {at: growth * heads // self.step(effect, plain, kv) for at, growth in axes.items()}
        # What may enter an output projection: a matrix with heads * head_dim on this side.
        sinks = [at for at in axes if len(self.base[at[0]]) == 2 and self.base[at[0]][at[1]] == inner[at]]
        if not axes or not sinks or not head_dim_key:
            return self.widen_heads(stage, level, heads, kv)
        stage = replace(stage, head_dim_key=head_dim_key)
        now = StageNumbers(heads, kv, self.config[head_dim_key], 1)
        options = {}
        axes = dict(effect.axes) if shared else axes
        kv_effect = None if plain else self.find_effect(**{kv_key: heads})
        if not plain and kv_effect is None:
            return replace(stage, heads_trouble="the number of key/value heads cannot change")
        per_kv = self.inside(kv_effect, None if shared else level)
        for at in {**axes, **per_kv}:
            size = self.base[at[0]][at[1]]
            a = axes.get(at, 0) // self.step(effect, plain, kv)
            b = per_kv.get(at, 0) // (kv_effect.step * heads) if per_kv else 0
            words = head_words(size, a, b, now)
            if not words:
                return replace(stage, heads_trouble=f"axis {at[1]} of '{at[0]}' is made of more than heads")
            if at in axes or b:
                options[at] = words
        more = heads + 2 if plain else heads + kv
        kind = heads_kind(now, key, kv_key, more, heads - (2 if plain else kv))
        if not plain and heads <= kv:
            return replace(stage, heads_trouble="every key/value head has one head")
        if not shared and (outside := self.outside_axes(effect, level, "the heads")):
            return replace(stage, heads_trouble=outside)
        places, trouble = self.find_units(key, options, kind, level, shared)
        if fails(trouble):  # the library may want heads that divide the width
            whole = heads_kind(now, key, kv_key, 2 * heads, heads // 2)
            again, still = self.find_units(f"{key}, dividing", options, whole, level, shared)
            if still is None:
                return replace(stage, heads=self.part(key, again), heads_divide_width=True)
            trouble = trouble if fails(still) else still
        return replace(stage, heads=self.part(key, places), heads_trouble=self.in_words(trouble, options))

    def find_units(
        self, name: str, options: Mapping[Axis, list[str]], kind: UnitKind, level: Level, shared: bool
    ) -> tuple[dict[str, list[UnitPlace]], str | None]:
        """Where a stage's units of a kind stand, and why they cannot change. A number that several stages share is
        looked into once, for all of them together.
        """
        if not shared:
            return explain_axes(self.trial, options, kind)
        if name not in self.joint:
            places, trouble = explain_axes(self.trial, options, kind)
            self.joint[name] = places, trouble or find_unreached(self.trial, places)
        places, trouble = self.joint[name]
        return of_stages(self.trial, places).get(self.levels.index(level), {}), trouble

    def widen_heads(self, stage: Stage, level: Level, heads: int, kv: int) -> Stage:
        """Heads of a library that derives head_dim from width // heads: by our modelling file, if it can be proven."""
        width = self.width(stage)
        if not isinstance(width, int) or width % heads:
            return replace(stage, heads_trouble="its width is no multiple of its heads")
        first = self.widen_heads_as(
            stage, level, Heads(stage.heads_key, stage.kv_key, heads, kv, width // heads, width)
        )
        if not first.heads_trouble or kv != heads or heads == 1:
            return first
        shared = Heads(stage.heads_key, SHARED, heads, 1, width // heads, width)  # one key/value head for all
        second = self.widen_heads_as(replace(stage, kv_key=SHARED), level, shared)
        return first if second.heads_trouble else second

    def widen_heads_as(self, stage: Stage, level: Level, now: Heads) -> Stage:
        """The same, with heads as they are taken to be."""
        heads, kv, plain = now.heads, now.kv_heads, now.heads == now.kv_heads
        more, fewer = (heads + 2, max(heads - 2, 1)) if plain else (heads + kv, heads - kv)
        numbered = StageNumbers(heads, kv, now.head_dim, 1)
        kind = heads_kind(numbered, now.key, now.kv_key, more, fewer)
        trouble = ""
        try:
            for spec in specs(self.library, self.config, self.trial.model, self.trial.inputs, level, now):
                library, lean = self.lean(spec, now)
                places = find_projection_units(self, spec["projections"], level)
                failed = proof(replace(self.trial, library=library, config=lean), (kind, places))
                if failed is None:
                    widened = replace(stage, heads=self.part(now.key, places), spec=self.name_own_keys(spec, level))
                    if not self.divides:
                        return widened
                    return replace(widened, halves_trouble=divided.trouble(self.trial, widened, numbered))
                trouble = trouble or failed
        except Unbuildable as error:
            trouble = str(error)
        over_all = {n for n, t in self.trial.state.items() if t.shape == (now.value("inner"),) and heads > 1}
        trouble = self.in_words(trouble, {(n, 0): [] for n in over_all if "q_norm" in n or "q_layernorm" in n})
        if "missing keys" in trouble:
            trouble = f"our modelling file does not load it by the names in its files ({trouble})"
        return replace(stage, heads_trouble=f"head_dim is width // heads in its library, and {trouble}")

    def name_own_keys(self, spec: dict[str, Any], level: Level) -> dict[str, Any]:
        """Stages keep their heads' sizes under keys of their own."""
        return spec if len(self.levels) == 1 else spec | {"head_dim": f"{HEAD_DIM}_{self.levels.index(level)}"}

    def in_words(self, trouble: str | None, options: Mapping[Axis, list[str]]) -> str:
        """A failed proof with its likeliest cause."""
        norm = next((n for n, _ in options if "norm" in n and self.trial.state[n].dim() == 1), None)
        if trouble and norm:
            return f"query and key norms run over all heads ('{norm}'; {trouble})"
        return trouble or ""

    @staticmethod
    def step(effect: Effect | None, plain: bool, kv: int) -> int:
        return 1 if effect is None else effect.step * (1 if plain else kv)

    def outside_axes(self, effect: Effect | None, level: Level, what: str) -> str:
        """Trouble where axes outside the blocks of a stage follow a number as well."""
        number = self.levels.index(level)
        others = (n for n, _ in effect.axes if (p := self.trial.locate(n)) is None or p[0] != number) if effect else ()
        name = next(iter(others), None)
        return f"'{name}' outside these blocks follows {what}" if name else ""

    def head_dim_key(self, level: Level, heads: int, axes: Mapping[Axis, int]) -> str | None:
        """The key whose growth makes an axis of heads * head_dim grow by the heads."""
        keys = [
            k for k in numbers(self.config) if self.general(k) in tiny.HEAD_DIMS or "head_dim" in k or k == "v_head_dim"
        ]
        for key in sorted(keys, key=lambda k: ("v_" not in k, self.general(k) not in tiny.HEAD_DIMS)):
            changes = self.find_effect(**{key: 1})
            for at, by in self.inside(changes, level).items():
                shape = self.base[at[0]]
                ends = len(shape) in (2, at[1] + 1)  # a matrix, or the last axis
                if at in axes and ends and by == changes.step * heads and shape[at[1]] == heads * self.config[key]:
                    return key
        return None

    def part(self, key: str, places: Mapping[str, list[UnitPlace]]) -> Part:
        """Places by template; all layers agree, since one word was tried for all."""
        axes: dict[str, dict[int, str]] = {}
        sinks: set[str] = set()
        for of_layer in places.values():
            for place in of_layer:
                axes.setdefault(place.template, {})[place.axis] = place.word
                sinks |= {place.template} if place.sink else set()
        return Part(key, {t: tuple(sorted(a.items())) for t, a in axes.items()}, tuple(sorted(sinks)))

    # -- MLP -----------------------------------------------------------------------------------------

    def with_mlp(self, stage: Stage, level: Level) -> Stage:
        trouble = "its config has no number of MLP units"
        for key in [*self.find_keys(tiny.MLPS, level), *self.find_keys((*tiny.EXPERT_MLPS, *tiny.SHARED_MLPS), level)]:
            effect = self.find_effect(**{key: 1})
            axes, shared = self.inside(effect, level), self.is_shared(effect, level)
            if not axes:
                continue
            shared = shared or len(self.levels) == 1  # a module beside the blocks may be as wide as they
            axes = dict(effect.axes) if shared else axes
            now = StageNumbers(1, 1, 1, self.config[key])
            options = {at: mlp_words(self.base[at[0]][at[1]], by // effect.step, now) for at, by in axes.items()}
            if any(not words for words in options.values()):
                trouble = trouble if stage.mlp_key else f"{key} also stands in axes of other meaning"
                continue
            if not shared and (outside := self.outside_axes(effect, level, f"'{key}', too")):
                return replace(stage, mlp_key=key, mlp_trouble=outside)
            kind = mlp_kind(now, lambda n, key=key: {key: n}, now.mlp + 16, now.mlp - 16)
            places, trouble_here = self.find_units(key, options, kind, level, shared)
            if trouble_here is None:
                return replace(stage, mlp_key=key, mlp=self.part(key, places), mlp_trouble="")
            stage = replace(stage, mlp_key=stage.mlp_key or key)
            trouble = trouble_here
        by_ratio = self.with_ratio(stage, level)
        return by_ratio if by_ratio.mlp_ratio else replace(stage, mlp_trouble=trouble)

    def with_ratio(self, stage: Stage, level: Level) -> Stage:
        """The MLP as a multiple of the width, which may hold for several stages at once."""
        number = self.levels.index(level)
        for key in self.ratio_keys(level):
            if key not in self.ratios:
                self.ratios[key] = self.proven_ratio(key)
            parts, trouble = self.ratios[key]
            if number in parts:
                return replace(stage, mlp_key=key, mlp_ratio=True, mlp=parts[number], mlp_trouble=trouble)
            stage = replace(stage, mlp_trouble=trouble or stage.mlp_trouble)
        return stage

    def ratio_keys(self, level: Level) -> list[str]:
        """Keys of the MLP's ratio to the width of a stage."""
        return ["mlp_ratio"] if tiny.is_number(self.config.get("mlp_ratio")) else []

    def proven_ratio(self, key: str) -> tuple[dict[int, Part], str]:
        """The units that a ratio counts, by stage, and why they cannot change."""
        old = self.config[key]
        grown = effect(self.library, self.config, self.base, {key: old + 1})
        if grown is None:
            return {}, f"its library does not build it with another {key}"
        by_stage: dict[int, dict[Axis, int]] = {}
        for at, by in grown.items():
            placed = self.trial.locate(at[0]) or ((0, at[0]) if len(self.levels) == 1 else None)
            if placed is None:
                return {}, f"'{at[0]}' outside the blocks follows the MLP"
            by_stage.setdefault(placed[0], {})[at] = by
        kinds, options = {}, {}
        for number, axes in by_stage.items():
            width = min(axes.values())
            now = StageNumbers(1, 1, 1, int(width * old))
            words = {at: mlp_words(self.base[at[0]][at[1]], by // width, now) for at, by in axes.items()}
            name, axis = self.find_width_axis(self.levels[number])
            own = self.base[self.levels[number].layer.format(i=1) + name][axis]
            if any(not of_axis for of_axis in words.values()) or width != own:
                return {}, "its MLP is no plain multiple of the width"
            less = old - 1 if old > 1 else old / 2
            by_units = {now.mlp: old, now.mlp + width: old + 1, int(width * less): less}
            kinds[number] = mlp_kind(now, lambda n, u=by_units: {key: u[n]}, now.mlp + width, int(width * less))
            options |= words
        places, trouble = explain_axes(self.trial, options, kinds)
        trouble = trouble or find_unreached(self.trial, places) or ""
        return {number: self.part(key, own) for number, own in of_stages(self.trial, places).items()}, trouble

    def find_width_axis(self, level: Level) -> tuple[str, int]:
        """A tensor of a block and its axis that has the width, which is what most axes of a block have."""
        start = level.layer.format(i=1)
        inside = {n.removeprefix(start): s for n, s in self.base.items() if n.startswith(start)}
        width = Counter(size for s in inside.values() for size in s if size > 1).most_common(1)[0][0]
        places = [(n, axis) for n, s in inside.items() for axis, size in enumerate(s) if size == width]
        return min(places, key=lambda place: len(inside[place[0]]))
