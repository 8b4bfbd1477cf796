"""A workspace as trainings leave it: summaries, curves, surgery with its choices and proof, head importance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.report.report_fixtures import ARMS, digits, write

SHAPES = {name: (depth, heads, mlp) for name, (depth, heads, mlp, *_) in ARMS.items()}


def stage(name: str) -> dict[str, int]:
    depth, heads, mlp = SHAPES[name]
    return {"depth": depth, "heads": heads, "head_dim": 16, "kv_heads": heads, "mlp_dim": mlp, "width": 64, "inner": 0}


def surgery(arm: str, **changes: Any) -> dict[str, Any]:
    """The record of a cut from the trained original, or of the original itself."""
    before, after = stage("original"), stage(arm)
    plan = {
        "why": "head_dim: keep, as asked",
        "head_policy": "keep",
        "init": "transfer",
        "seed": 0,
        "method": {"layers": "auto", "more": "add", "heal": "closed"},
        "before": {"stages": [before]},
        "after": {"stages": [after]},
        "layers": [0, 1, 2],
        "operators": [{"name": "drop-layers", "exactness": "near", "says": "keep 3 of 6 layers: 0, 1, 2"}],
        "parameters_before": {"attention": 99840, "mlp": 198528, "total": 302154},
        "parameters_after": {"attention": 99648, "mlp": 49728, "total": ARMS[arm][3]},
        "saved_by": {"depth": 149952, "heads": -49728, "mlp": 49536},
    }
    compared = {
        "done": True,
        "data": "task",
        "rows": 360,
        "max_difference": 4.3,
        "spread": 3.33,
        "relative_error": 0.21,
        "cosine": 0.9769,
        "loss": {"source": 0.134, "result": 0.143},
        "accuracy": {"source": 0.969, "result": 0.958},
        "scored": 360,
    }
    return {
        "source": {
            "name": "/home/somebody/runs/digits-vit/original-s0/last",
            "preset": None,
            "sha256": {"m": "ab" * 32},
        },
        "initialised": "transfer" if arm != "original" else "fresh",
        "history": [{"source": {"name": "digits-vit", "preset": "digits-vit"}}],
        "plan": plan,
        "decided": {
            "calibration": {"name": "task:digits", "says": "digits: 64 to fit", "sha256": "cd" * 32},
            "layers": [0, 1, 2],
            "criterion": "angular",
            "changed_tensors": 12,
            "candidates": [
                {"kept": [0, 2, 4], "criterion": "even", "judged_by": 0.1281, "data": "part"},
                {"kept": [0, 1, 2], "criterion": "angular", "attention": True, "judged_by": 0.001222, "data": "all"},
            ],
        },
        "proof": {"loaded_with": "transformers.X.from_pretrained", "parameters": ARMS[arm][3], "compared": compared},
        "language": False,
    } | changes


HEADS = {
    "schema_version": 1,
    "kind": "heads",
    "samples": {"importance": 128},
    "attentions": [
        {"kind": "self", "stage": 0, "layer": i, "heads": 8, "importance": [0.1 * (i + 1) + 0.01 * h for h in range(8)]}
        for i in range(3)
    ],
    "curve": {"orders": {"importance": [{"fraction": f / 4, "accuracy": 0.95 - 0.2 * f} for f in range(5)]}},
}


TIMING = {"low": 0.9, "high": 1.1, "rounds": 7}
BENCH = {
    "model": "lean-s0",
    "device": "cpu, 2 threads",
    "load": {"batch": 64, "tokens": None, "precision": "fp32", "rounds": 7},
    "unit": "images",
    "peak_memory_kind": "live tensors of a step, counted",
    "rows": [
        {
            "name": name,
            "backend": "auto",
            "parameters": ARMS[name][3],
            "seconds": {"step": TIMING | {"median": step}, "forward": TIMING | {"median": step / 3}},
            "training_per_second": 64 / step,
            "forward_per_second": 192 / step,
            "peak_memory": int(step * 2**30),
            "step_against_first": {"low": step, "median": step / 0.04, "high": step, "verdict": verdict},
        }
        for name, step, verdict in (("original", 0.04, "same"), ("lean", 0.03, "faster"))
    ],
    "skipped": ["flash: not on a CPU"],
    "remarks": ["head_dim 16 is below 64"],
}


def curve(steps: int, last: float) -> str:
    rows: list[dict[str, Any]] = [{"type": "eval", "step": 0, "loss": 2.3, "metric": 0.1}]
    for step in range(0, steps + 1, steps // 6):
        if step:
            rows.append({"type": "train", "step": step, "epoch": 1.0, "loss": 2.3 / (1 + step), "lr": 1e-3})
            rows.append({"type": "eval", "step": step, "loss": 1.0 / step, "metric": last - 0.1 / step})
    return "".join(json.dumps(row) + "\n" for row in rows)


def workspace(folder: Path) -> Path:
    """`folder` filled with the digits experiment, three arms and three seeds, everything measured."""
    for made in digits():
        arm, seed = made["experiment"]["arm"], made["seed"]
        made["model"]["surgery"] = surgery(arm)
        made["experiment"]["init"] = "fresh" if arm == "original" else "transfer"
        run = write(folder / "digits-vit" / f"{arm}-s{seed}", made)
        (run / "metrics.jsonl").write_text(curve(made["steps"], made["final"]["metric"]))
        (run / "recipe.yaml").write_text("name: digits-vit\ntrain: {duration: 30ep}\n")
        if arm == "lean" and seed == 0:
            write(run, HEADS, "heads.json")
            write(run, BENCH, "bench.json")
    return folder
