"""Summaries as `leansurgeon retrain` writes them, with figures of the size that the digits experiment gives."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leansurgeon.report import sections
from leansurgeon.report.rows import Section
from leansurgeon.report.runs import read_run
from leansurgeon.report.tables import render
from leansurgeon.training.runs.summary import Summary

ARMS = {  # depth, heads, mlp, parameters, accuracies of three seeds, kappa per layer, ms per step, MiB
    "original": (6, 4, 256, 302154, (0.9750, 0.9778, 0.9750), (40, 183, 307, 422, 606, 960), 31.2, 612),
    "lean": (3, 8, 128, 152394, (0.9806, 0.9833, 0.9889), (17, 44, 95), 17.9, 588),
    "control": (3, 4, 256, 152202, (0.9611, 0.9694, 0.9778), (41, 168, 357), 15.1, 581),
}


def kappa(medians: tuple[float | None, ...], samples: int = 64, dtype: str = "float32") -> dict[str, Any]:
    layers = [
        {
            "layer": i,
            "mean": m and m * 1.1,
            "median": m,
            "geometric_mean": m,
            "log_sd": 0.2,
            "worst": m and m * 2.5,
            "rank": 17 if m else 16,
            "k": 17,
            "deficient": 0 if m else samples,
            "lower_bound": None if m else 3.1e7,
            "median_lower_bound": None if m else 2.9e7,
            "centred_median": m and m / 4,
            "centred_lower_bound": None if m else 1e6,
            "stable_rank": 1.31,
            "effective_rank": 9.7,
            "aspect": 128 / 17,
        }
        for i, m in enumerate(medians, 1)
    ]
    known = sorted(m for m in medians if m)
    whole = len(known) == len(medians)
    middle = known[len(known) // 2] if len(known) % 2 else sum(known[len(known) // 2 - 1 : len(known) // 2 + 1]) / 2
    model = {
        "mean": sum(known) / len(known) * 1.1 if whole else None,
        "median": middle if whole else None,
        "worst": max(known) if whole else None,
        "lower_bound": None if whole else 2.9e7,
        "median_lower_bound": None if whole else 1e5,
        "centred_median": middle / 4,
        "deficient": sum(layer["deficient"] for layer in layers),
    }
    return {"samples": samples, "tokens": 17 * samples, "forward_dtype": dtype, "layers": layers, "model": model}


def summary(arm: str = "lean", seed: int = 0, experiment: str | None = "digits-vit", **changes: Any) -> dict[str, Any]:
    """One run of an arm of the digits experiment; `changes` replace top-level keys."""
    depth, heads, mlp, parameters, accuracy, medians, step_ms, mib = ARMS[arm]
    stage = {"depth": depth, "heads": heads, "head_dim": 16, "kv_heads": heads, "mlp_dim": mlp, "width": 64}
    minute = list(ARMS).index(arm) + 10 * seed
    made = {
        "schema_version": 1,
        "name": "digits-vit",
        "status": "done",
        "model": {
            "source": "digits-vit",
            "shape": {"stages": [stage | {"inner": heads * 16}]},
            "parameters": parameters,
            "parts": {"embeddings": 2000, "attention": 50000, "mlp": parameters - 53000, "rest": 1000},
            "surgery": None,
        },
        "task": {
            "name": "digits",
            "metric": "accuracy",
            "metric_label": "top-1 accuracy",
            "higher_is_better": True,
            "percent": True,
            "train_samples": 1437,
            "eval_samples": 360,
        },
        "seed": seed,
        "device": "cpu",
        "world_size": 1,
        "precision": "fp32",
        "versions": {"torch": "2.13.0"},
        "before": {"loss": 2.31, "metric": 0.1},
        "final": {"loss": 0.0812 + 0.01 * seed, "metric": accuracy[seed % 3]},
        "best": {"loss": 0.08, "metric": accuracy[seed % 3] + 0.002, "step": 600},
        "epochs": 30.0,
        "steps": 690,
        "seconds": 24.1,
        "step_ms": step_ms + 0.3 * seed,
        "throughput": 64000 / step_ms,
        "throughput_unit": "samples/s",
        "memory": {"bytes": mib * 2**20, "kind": "process peak RSS"},
        "kappa": kappa(medians),
        "recipe": {"name": "digits-vit"},
        "started": f"2026-01-31T14:{minute:02d}:00+00:00",
        "finished": f"2026-01-31T14:{minute:02d}:50+00:00",
        "experiment": {"name": experiment, "arm": arm, "seed": seed} if experiment else None,
        "last_losses_still_falling": False,
    }
    return made | changes


def digits(seeds: tuple[int, ...] = (0, 1, 2), arms: tuple[str, ...] = tuple(ARMS)) -> list[dict[str, Any]]:
    """The whole digits experiment, in the order in which it is trained."""
    return [summary(arm, seed) for seed in seeds for arm in arms]


def perplexities(values: dict[str, tuple[float, ...]], kind: str = "cuda allocator peak") -> list[dict[str, Any]]:
    """A language experiment: the perplexity of every arm and seed, at the size of the Tiny-Stories GPT."""
    task = {
        "name": "causal-lm",
        "metric": "perplexity",
        "metric_label": "perplexity",
        "higher_is_better": False,
        "percent": False,
        "train_samples": 12000,
        "eval_samples": 800,
    }
    size = {"original": 89_160_785, "lean": 64_150_609}
    found = []
    for seed in range(len(next(iter(values.values())))):
        for arm, numbers in values.items():
            base = summary(arm if arm in ARMS else "lean", seed, "austen-gpt", task=task)
            base["model"] |= {"parameters": size.get(arm, 64_200_000)}
            base |= {
                "experiment": {"name": "austen-gpt", "arm": arm, "seed": seed},
                "final": {"loss": 3.1, "metric": numbers[seed]},
                "best": {"loss": 3.0, "metric": numbers[seed] - 0.1, "step": 100},
                "memory": {"bytes": 13_400_000_000, "kind": kind},
                "device": "NVIDIA A100-SXM4-40GB",
                "step_ms": 1234.5,
                "kappa": kappa((1260.0,) * (12 if arm == "original" else 4)),
            }
            found.append(base)
    return found


def write(folder: Path, data: dict[str, Any], name: str = "summary.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(data))
    return folder


def experiment_section(summaries: Iterable[dict]) -> list[Section]:
    """The sections of trainings whose summary.json would hold these."""
    runs = [read_run(Path(), Summary.from_dict(one), float(i)) for i, one in enumerate(summaries)]
    return sections.sections(runs)


def experiment_table(summaries: Iterable[dict], format: str = "table") -> str:
    """The table of trainings whose summary.json would hold these."""
    return render.render(experiment_section(summaries), format)
