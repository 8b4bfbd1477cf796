"""Explore the family of a config: build it small, change one number at a time, and prove what surgery will use."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from leansurgeon.architectures.infer import cuts, divided, tiny, traits
from leansurgeon.architectures.infer.differences import (
    Axis,
    Level,
    build_small_config,
    effect,
    fill_in_numbers,
    levels,
    numbers,
    shapes,
)
from leansurgeon.architectures.infer.finding import Finding, Part, Stage
from leansurgeon.architectures.infer.library import FAILED, Library, Unbuildable, quietly, whole
from leansurgeon.architectures.infer.tiny import Config, aliases
from leansurgeon.architectures.infer.units import (
    UnitKind,
    explain_axes,
    find_unreached,
    heads_kind,
    mlp_kind,
    of_stages,
    proof,
)
from leansurgeon.architectures.infer.widened import HEAD_DIM, LeanLibrary, find_projection_units, lean_config, specs
from leansurgeon.architectures.infer.words import Places, head_words, mlp_words
from leansurgeon.architectures.tensors import read_key
from leansurgeon.architectures.towers import SECTIONS
from leansurgeon.shape import Stage as Numbers


def announce(name: str) -> None:
    """Tell the user what takes time."""
    said = f"Inferring a declaration of '{name}' and proving it on a small random model (once) ..."
    print(said, file=sys.stderr, flush=True)


def fails(trouble: str | None) -> bool:
    """Return whether the library failed on what was tried, so that nothing could be compared."""
    return trouble is not None and any(text in trouble for text in FAILED)


SHARED = "=1"  # the number 1 itself, in place of a key


def sections_of(config: Config, tower: str | None) -> list[str]:
    """Return the parts of a config that may describe towers, the likelier first.

    These are the parts of the requested tower, or all usual ones, then the config itself (an empty name), and finally
    parts that are rarely towers of their own.
    """

    def there(keys: Iterable[str]) -> list[str]:
        return [k for k in keys if isinstance(config.get(k), dict)]

    if tower:
        return there(SECTIONS[tower]) or [""]
    places = SECTIONS.values()
    return [*there(usual for usual, *_ in places), "", *there(key for _, *rest in places for key in rest)]


def explore(config: Config, tower: str | None = None) -> Finding:
    """Return everything that can be found about the family of a `config.json`.

    Errors of the library are never raised.
    """
    announce(config["model_type"])
    with quietly(), torch.random.fork_rng(devices=[]):
        full = whole(config)
        library = Library.of(full)
        try:
            small = build_small_config(library, full)
        except Unbuildable as error:
            return Finding(full["model_type"], library.cls.__name__, (), f"no small model of it runs: {error}")
        best: Finding | None = None
        for section in sections_of(small, tower):
            part = replace(library, outer=small, section=section)
            own = fill_in_numbers(part, small[section] if section else small)
            finding = replace(Search(part, own).finding(), section=section)
            if finding.proven["depth"]:
                best = finding
                break
            best = best if best and not (best.trouble and finding.stages) else finding
        if tower and not best.section:
            best = replace(best, stages=(), trouble=f"it has no tower of its own for {tower}")
    return replace(best, model_type=full["model_type"])


Effect = Mapping[Axis, int]  # what each unit of a number adds to every axis


class Search:
    """The exploration of one family with a small `config`. `divides`: heads of half the size are tried as well."""

    divides = True

    def __init__(self, library: Library, config: Config) -> None:
        self.library, self.config, self.names = library, config, aliases(config)
        self.base = shapes(library, config)
        self.levels, self.troubles = levels(library, config)
        self.trial = cuts.Trial.of(library, config, self.levels)
        self.known: dict[tuple[str, ...], Effect | None] = {}
        self.joint: dict[str, tuple[Places, str | None]] = {}  # for numbers that several stages share
        self.ratios: dict[str, tuple[dict[int, Part], str]] = {}

    def width(self, stage: Stage) -> int | None:
        """Return the number of channels of the residual stream in a stage."""
        return self.config.get(stage.width_key)

    def lean(self, spec: dict[str, Any], now: Numbers) -> tuple[Library, Config]:
        """Return the library behind our modelling file and its config, with the present heads."""
        full, section = self.library.join_config(self.config), self.library.section
        config = lean_config(full, self.library.cls.__name__, [spec], {HEAD_DIM: now.head_dim}, section)
        library = LeanLibrary(self.library.cls, config if section else {}, section)
        return library, config[section] if section else config

    def finding(self) -> Finding:
        """Return the complete finding."""
        trouble = "" if self.levels else "; ".join(self.troubles) or "no list of blocks follows a number of the config"
        if trouble and isinstance(depths := self.config.get("depths"), list | tuple):
            trouble = f"its {len(depths)} stages differ in width, and only models of timm are cut in stages (timm/NAME)"
        stages = []
        for level in self.levels:
            stage = self.begin(level)
            shared = next((n for n in self.library.tied_names(self.trial.model) if self.trial.locate(n)), None)
            if shared:
                stage = replace(stage, depth_trouble=f"its layers share weights ('{shared}')")
            else:  # single layers after some that must stay can be dropped, or groups if kinds alternate
                why, first, last, group = cuts.droppable(self.library, self.config, level)
                stage = replace(stage, depth_trouble=why, stay=first, stay_last=last, period=group)
            stage = self.with_mlp(self.with_heads(stage, level), level)
            stage = traits.describe_stage(self.trial, stage, level)
            if stage.standard:
                stage = replace(stage, bases=divided.free_bases(self.trial, stage, self.count_heads(stage)))
            stages.append(stage)
        return Finding(
            self.config["model_type"],
            self.library.cls.__name__,
            tuple(stages),
            trouble,
            parameters=sum(p.numel() for p in self.trial.model.parameters()),
            causal=self.library.section in ("", "text_config") and traits.is_causal(self.trial),
            buffers=tuple(name for name in traits.list_buffers(self.trial) if not self.trial.locate(name)),
            inputs=tuple(sorted(self.trial.inputs)),
        )

    # -- numbers -------------------------------------------------------------------------------------

    def count_heads(self, stage: Stage) -> Numbers:
        """Return the numbers of a stage whose heads are known."""
        heads, width = self.config[stage.heads_key], self.width(stage)
        kv = read_key(self.config, stage.kv_key) if stage.kv_key else heads
        return Numbers(1, heads, self.config.get(stage.head_dim_key) or width // heads, kv, 1, width)

    def general(self, key: str) -> str:
        return self.names.get(key, key)

    def find_effect(self, **by: int) -> Effect | None:
        """Return the effect of numbers that grow together, by the first step that the library accepts."""
        at = tuple(sorted(by))
        if at not in self.known:
            self.known[at] = None
            first = self.config[at[0]]
            for step in dict.fromkeys((1, 2, first)):
                changes = {key: self.config[key] + step * by[key] for key in at}
                axes = effect(self.library, self.config, self.base, changes)
                if axes is None and set(at) <= set(tiny.HEAD_DIMS):  # rotary settings may have to match
                    turned = {k: tiny.rope(self.config[k], changes[at[0]]) for k in tiny.ROTARY if k in self.config}
                    axes = effect(self.library, self.config | turned, self.base, changes) if turned else None
                if axes is not None:
                    self.known[at] = {axis: growth // (step * by[at[0]]) for axis, growth in axes.items()}
                    break
        return self.known[at]

    def find_keys(self, names: tuple[str, ...], level: Level) -> list[str]:
        """Return the keys of such a name, first those that share a word with the stage, then in order of `names`."""
        keys = [k for k in numbers(self.config) if self.general(k) in names]
        side = next((s for s in ("encoder", "decoder") if s in level.key or f"{s}." in level.layer), "")
        other = {"encoder": "decoder", "decoder": "encoder"}.get(side, " ")
        keys = [k for k in keys if not k.startswith(other)] or keys
        return sorted(keys, key=lambda k: (not (side and k.startswith(side)), names.index(self.general(k))))

    def inside(self, effect: Effect, level: Level | None) -> dict[Axis, int]:
        """Return the part of an effect in the blocks of a stage, or of all stages without a `level`."""
        number = self.levels.index(level) if level else None
        placed = {at: self.trial.locate(at[0]) for at in effect}
        return {at: effect[at] for at, p in placed.items() if p and number in (None, p[0])}

    def reach(self, effect: Effect, level: Level) -> tuple[dict[Axis, int], bool]:
        """Return the effect in a stage, and whether the rest is in blocks of other stages, which share the number."""
        inside, blocks = self.inside(effect, level), self.inside(effect, None)
        return inside, len(effect) == len(blocks) > len(inside) > 0

    # -- stages --------------------------------------------------------------------------------------

    def begin(self, level: Level) -> Stage:
        """Return a stage with its width only."""
        width = next(iter(self.find_keys(tiny.WIDTHS, level)), "hidden_size")
        return Stage(level.layer, level.key, width, level.lists, taps=level.taps)

    # -- heads ---------------------------------------------------------------------------------------

    def with_heads(self, stage: Stage, level: Level) -> Stage:
        keys = self.find_keys(tiny.HEADS, level)
        if not keys:
            return replace(stage, heads_trouble="its config has no number of heads")
        key, kv_key = keys[0], next(iter(self.find_keys(tiny.KV_HEADS, level)), None)
        stage = replace(stage, heads_key=key, kv_key=kv_key)
        heads = self.config[key]
        kv = self.config[kv_key] if kv_key else heads
        plain = kv == heads
        effect = self.find_effect(**({key: 1} | ({kv_key: 1} if kv_key else {}) if plain else {key: kv})) or {}
        axes, shared = self.reach(effect, level)
        head_dim_key = self.head_dim_key(level, heads, axes)
        # Candidates for the input of an output projection: a matrix with heads * head_dim on this side.
        enters = (
            len(self.base[name]) == 2 and self.base[name][axis] == by * heads for (name, axis), by in axes.items()
        )
        if not any(enters) or not head_dim_key:
            return self.widen_heads(stage, level)
        stage = replace(stage, head_dim_key=head_dim_key)
        now = self.count_heads(stage)
        axes = effect if shared else axes
        kv_effect = {} if plain else self.find_effect(**{kv_key: heads})
        if kv_effect is None:
            return replace(stage, heads_trouble="the number of key/value heads cannot change")
        per_kv = self.inside(kv_effect, None if shared else level)
        options = {}
        for at in {**axes, **per_kv}:
            options[at] = head_words(self.base[at[0]][at[1]], axes.get(at, 0), per_kv.get(at, 0), now)
            if not options[at]:
                return replace(stage, heads_trouble=f"axis {at[1]} of '{at[0]}' is made of more than heads")
        if not plain and heads <= kv:
            return replace(stage, heads_trouble="every key/value head has one head")
        if outside := [at[0] for at in effect if at not in axes]:
            return replace(stage, heads_trouble=f"'{outside[0]}' outside these blocks follows the heads")
        step = 2 if plain else kv
        kind = heads_kind(now, key, kv_key, heads + step, heads - step)
        places, trouble = self.find_units(key, options, kind, level, shared)
        if fails(trouble):  # the library may require heads that divide the width
            whole = heads_kind(now, key, kv_key, 2 * heads, heads // 2)
            again, still = self.find_units(f"{key}, dividing", options, whole, level, shared)
            if still is None:
                return replace(stage, heads=self.part(again), heads_divide_width=True)
            trouble = trouble if fails(still) else still
        return replace(stage, heads=self.part(places), heads_trouble=self.in_words(trouble, [n for n, _ in options]))

    def find_units(
        self, name: str, options: Mapping[Axis, list[str]], kind: UnitKind, level: Level, shared: bool
    ) -> tuple[Places, str | None]:
        """Return the places of a stage's units, and why they cannot change.

        A number that several stages share is examined once, for all of them together.
        """
        if shared and name in self.joint:
            places, trouble = self.joint[name]
        else:
            places, trouble = explain_axes(self.trial, options, lambda places: [(kind, places)])
        if not shared:
            return places, trouble
        self.joint[name] = places, trouble or find_unreached(self.trial, places)
        return of_stages(self.trial, places).get(self.levels.index(level), {}), self.joint[name][1]

    def widen_heads(self, stage: Stage, level: Level) -> Stage:
        """Try to support heads of any size by our modelling file; the library derives head_dim from width // heads."""
        width, heads = self.width(stage), self.config[stage.heads_key]
        if not isinstance(width, int) or width % heads:
            return replace(stage, heads_trouble="its width is no multiple of its heads")
        first = self.widen_heads_as(stage, level)
        if not first.heads_trouble or heads == 1 or self.count_heads(stage).kv_heads != heads:
            return first
        second = self.widen_heads_as(replace(stage, kv_key=SHARED), level)  # one key/value head for all
        return first if second.heads_trouble else second

    def widen_heads_as(self, stage: Stage, level: Level) -> Stage:
        """Do the same with the key/value heads that the stage names."""
        now, trouble = self.count_heads(stage), ""
        heads, kv = now.heads, now.kv_heads
        more, fewer = (heads + 2, max(heads - 2, 1)) if heads == kv else (heads + kv, heads - kv)
        kind = heads_kind(now, stage.heads_key, stage.kv_key, more, fewer)
        try:
            for spec in specs(self.trial, stage, level, now):
                library, lean = self.lean(spec, now)
                places = find_projection_units(self.trial, spec["projections"], level)
                failed = proof(replace(self.trial, library=library, config=lean), [(kind, places)])
                if failed is None:
                    if len(self.levels) > 1:  # each stage stores its head size under its own key
                        spec["head_dim"] = f"{HEAD_DIM}_{self.levels.index(level)}"
                    widened = replace(stage, heads=self.part(places), spec=spec)
                    if not self.divides:
                        return widened
                    return replace(widened, halves_trouble=divided.trouble(self.trial, widened, now))
                trouble = trouble or failed
        except Unbuildable as error:
            trouble = str(error)
        over_all = [n for n, t in self.trial.state.items() if t.shape == (now.inner,) and heads > 1]
        trouble = self.in_words(trouble, [n for n in over_all if "q_norm" in n or "q_layernorm" in n])
        if "missing keys" in trouble:
            trouble = f"our modelling file does not load it by the names in its files ({trouble})"
        return replace(stage, heads_trouble=f"head_dim is width // heads in its library, and {trouble}")

    def in_words(self, trouble: str | None, names: Iterable[str]) -> str:
        """Return a failed proof with its likeliest cause, if one of these tensors is it."""
        norm = next((n for n in names if "norm" in n and self.trial.state[n].dim() == 1), None)
        if trouble and norm:
            return f"query and key norms run over all heads ('{norm}'; {trouble})"
        return trouble or ""

    def head_dim_key(self, level: Level, heads: int, axes: Mapping[Axis, int]) -> str | None:
        """Return the key whose growth by one makes an axis of heads * head_dim grow by the number of heads."""
        keys = [k for k in numbers(self.config) if self.general(k) in tiny.HEAD_DIMS or "head_dim" in k]
        for key in sorted(keys, key=lambda k: ("v_" not in k, self.general(k) not in tiny.HEAD_DIMS)):
            for (name, axis), by in self.inside(self.find_effect(**{key: 1}) or {}, level).items():
                sizes = self.base[name]
                ends = len(sizes) in (2, axis + 1)  # a matrix, or the last axis
                if (name, axis) in axes and ends and by == heads and sizes[axis] == heads * self.config[key]:
                    return key
        return None

    def part(self, places: Places) -> Part:
        """Return the places by template; all layers agree, because one word was tried for all."""
        axes: dict[str, dict[int, str]] = {}
        every = [place for of_layer in places.values() for place in of_layer]
        for place in every:
            axes.setdefault(place.template, {})[place.axis] = place.word
        sinks = {place.template for place in every if place.sink}
        return Part({t: tuple(sorted(a.items())) for t, a in axes.items()}, tuple(sorted(sinks)))

    # -- MLP -----------------------------------------------------------------------------------------

    def with_mlp(self, stage: Stage, level: Level) -> Stage:
        trouble = "its config has no number of MLP units"
        for key in [*self.find_keys(tiny.MLPS, level), *self.find_keys((*tiny.EXPERT_MLPS, *tiny.SHARED_MLPS), level)]:
            effect = self.find_effect(**{key: 1}) or {}
            axes, shared = self.reach(effect, level)
            if not axes:
                continue
            shared = shared or len(self.levels) == 1  # a module beside the blocks may have the same width
            axes, units = effect if shared else axes, self.config[key]
            options = {at: mlp_words(self.base[at[0]][at[1]], by, units) for at, by in axes.items()}
            if not all(options.values()):
                trouble = trouble if stage.mlp_key else f"{key} also stands in axes of other meaning"
                continue
            if outside := [at[0] for at in effect if at not in axes]:
                return replace(
                    stage, mlp_key=key, mlp_trouble=f"'{outside[0]}' outside these blocks follows '{key}', too"
                )
            kind = mlp_kind(key, {n: n for n in (units, units + 16, units - 16)})
            places, trouble_here = self.find_units(key, options, kind, level, shared)
            if trouble_here is None:
                return replace(stage, mlp_key=key, mlp=self.part(places), mlp_trouble="")
            stage = replace(stage, mlp_key=stage.mlp_key or key)
            trouble = trouble_here
        by_ratio = self.with_ratio(stage, level)
        return by_ratio if by_ratio.mlp_ratio else replace(stage, mlp_trouble=trouble)

    def with_ratio(self, stage: Stage, level: Level) -> Stage:
        """Find an MLP given as a multiple of the width, which may apply to several stages at once."""
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
        """Return the keys of the ratio of MLP to width of a stage."""
        return ["mlp_ratio"] if tiny.is_number(self.config.get("mlp_ratio")) else []

    def proven_ratio(self, key: str) -> tuple[dict[int, Part], str]:
        """Return the units that a ratio determines, by stage, and why they cannot change."""
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
            units, less = int(width * old), old - 1 if old > 1 else old / 2
            words = {at: mlp_words(self.base[at[0]][at[1]], by // width, units) for at, by in axes.items()}
            name, axis = self.find_width_axis(self.levels[number])
            own = self.base[self.levels[number].layer.format(i=1) + name][axis]
            if not all(words.values()) or width != own:
                return {}, "its MLP is no plain multiple of the width"
            kinds[number] = mlp_kind(key, {units: old, units + width: old + 1, int(width * less): less})
            options |= words

        def parts(places: Places) -> list[tuple[UnitKind, Places]]:
            return [(kinds[number], own) for number, own in of_stages(self.trial, places).items()]

        places, trouble = explain_axes(self.trial, options, parts)
        trouble = trouble or find_unreached(self.trial, places) or ""
        return {number: self.part(own) for number, own in of_stages(self.trial, places).items()}, trouble

    def find_width_axis(self, level: Level) -> tuple[str, int]:
        """Return a tensor of a block and its axis that has the width, the most common size in a block."""
        start = level.layer.format(i=1)
        inside = {n.removeprefix(start): s for n, s in self.base.items() if n.startswith(start)}
        width = Counter(size for s in inside.values() for size in s if size > 1).most_common(1)[0][0]
        places = [(n, axis) for n, s in inside.items() for axis, size in enumerate(s) if size == width]
        return min(places, key=lambda place: len(inside[place[0]]))
