"""Proof by reloading: a fresh process loads the folder with plain libraries, and its account is compared with the plan.
A second one runs the source on the same inputs, and the outputs of both are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leansurgeon import architectures
from leansurgeon.errors import LeanSurgeonError, disk_is_full

SCRIPT = Path(__file__).with_name("reload_check.py")
EXACT = 1e-4  # of the outputs' spread: what rounding in fp32 may cost an exact plan


def prove(
    folder: Path,
    parameters: int,
    *,
    source: Path | None = None,
    batches: Sequence[dict[str, Any]] | None = None,
    kind: str = "plain",
    exact: bool = False,
) -> dict[str, Any]:
    """Reload `folder` and check parameter count, missing and unexpected keys, and the outputs.

    `source` is the folder that the result is compared with, on held-out `batches` (without them, on noise). `exact`
    says that the plan promises the same function. Returns the account of the fresh process, with `compared` where a
    source was given. Raises `LeanSurgeonError` with the first thing that is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="leansurgeon-") as scratch:
        room = Path(scratch)
        inputs = written(batches, room / "inputs.safetensors") if batches else None
        account = run(folder, inputs, room / "result.safetensors", kind)
        check(account, parameters)
        if source is not None:
            account["compared"] = against(source, account, inputs, room, kind, exact)
    return account


def check(account: dict[str, Any], parameters: int) -> None:
    """What must hold of every result, whatever its source. Raises `LeanSurgeonError`."""
    problems = []
    if account["missing"]:
        problems.append(f"{len(account['missing'])} tensors are missing, the first is {account['missing'][0]}")
    if account["unexpected"]:
        problems.append(f"{len(account['unexpected'])} tensors have no place, the first is {account['unexpected'][0]}")
    if account.get("mismatched"):
        problems.append(f"sizes differ: {account['mismatched'][0]}")
    if account["parameters"] != parameters:
        problems.append(f"the library counts {account['parameters']:,} parameters where the plan has {parameters:,}")
    if not account["finite"]:
        problems.append("the forward pass gives NaN or Inf")
    if problems:
        raise LeanSurgeonError(
            f"The result does not reload as it should: {'; '.join(problems)}.", "Nothing was kept. Please report this."
        )


def against(
    source: Path, result: dict[str, Any], inputs: Path | None, room: Path, kind: str, exact: bool
) -> dict[str, Any]:
    """How far the result's outputs lie from the source's."""
    try:
        original = run(source, inputs, room / "source.safetensors", kind)
    except LeanSurgeonError as error:
        return {"done": False, "why": f"the source itself does not load with its library ({error.message})"}
    if original["output"] != result["output"]:
        return {"done": False, "why": f"the outputs are {result['output']} and the source's {original['output']}"}
    found = {"done": True, "data": "held-out data" if inputs else "noise"}
    found |= differences(room / "source.safetensors", room / "result.safetensors")
    if result["count"]:
        found["loss"] = {"source": original["loss_sum"] / original["count"], "result": mean_loss(result)}
        found["accuracy"] = {
            "source": original["right"] / original["count"],
            "result": result["right"] / result["count"],
        }
        found["scored"] = result["count"]
    if exact and found["max_difference"] > EXACT * found["spread"]:
        raise LeanSurgeonError(
            f"The plan promises the same function, and outputs differ by {found['max_difference']:.2g} where their "
            f"spread is {found['spread']:.2g} ({EXACT:g} of it is allowed).",
            "Nothing was kept. Please report this.",
        )
    return found


def mean_loss(account: dict[str, Any]) -> float:
    return account["loss_sum"] / account["count"]


def differences(source: Path, result: Path) -> dict[str, Any]:
    """Outputs of two models on the same inputs, both (rows, values), compared in fp64."""
    import torch
    from safetensors.torch import load_file

    a, b = load_file(source), load_file(result)
    rows, cosine = compare_rows(a["rows"], b["rows"])
    found = rows | {"cosine": float(cosine.mean())}
    if len(a["pooled"]):
        _, pooled = compare_rows(a["pooled"], b["pooled"])
        low = torch.quantile(pooled, 0.01)
        found["embeddings"] = {"cosine": float(pooled.mean()), "first_percentile": float(low), "samples": len(pooled)}
    return found


def compare_rows(a, b) -> tuple[dict[str, float], Any]:
    """Largest difference, spread of `a` (standard deviation), relative error, and the cosine of every row."""
    import torch

    largest, error, size, total, cosines = 0.0, 0.0, 0.0, 0.0, []
    for x, y in zip(a.split(256), b.split(256), strict=True):
        x, y = x.double(), y.double()
        largest = max(largest, float((x - y).abs().max()))
        error += float((x - y).square().sum())
        size += float(x.square().sum())
        total += float(x.sum())
        cosines.append(torch.nn.functional.cosine_similarity(x, y, dim=-1))
    mean = total / a.numel()
    return {
        "rows": len(a),
        "max_difference": largest,
        "spread": max(size / a.numel() - mean**2, 0.0) ** 0.5,
        "relative_error": (error / size) ** 0.5 if size else 0.0,
    }, torch.cat(cosines)


def written(batches: Sequence[dict[str, Any]], file: Path) -> Path:
    """Batches as a file that the other process reads."""
    from safetensors.torch import save_file

    tensors = {f"{i}.{key}": value.contiguous() for i, batch in enumerate(batches) for key, value in batch.items()}
    try:
        save_file(tensors, file)
    except Exception as error:
        if disk_is_full(error):
            raise LeanSurgeonError("The disk of the temporary folder is full.", "Free some space there.") from None
        raise
    return file


def run(folder: Path, inputs: Path | None, outputs: Path, kind: str) -> dict[str, Any]:
    """The account of a fresh process that loads `folder` and runs it."""
    config = json.loads((folder / "config.json").read_text())
    ours = config.get("architecture", "").startswith("leansurgeon_")
    file = architectures.of(config).modelling if ours else None
    extra = ["--outputs", str(outputs), "--kind", kind]
    extra += ["--module", f"leansurgeon.models.{file.removesuffix('.py')}"] if file else []
    extra += ["--inputs", str(inputs)] if inputs else []
    # Isolated mode keeps the working directory off the path; modelling files are cached in a folder that goes away.
    with tempfile.TemporaryDirectory(prefix="leansurgeon-") as cache:
        env = os.environ | {
            "HF_MODULES_CACHE": cache,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-I", str(SCRIPT), str(folder.absolute()), *extra],
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LeanSurgeonError(f"{folder.name} cannot be reloaded: {last}", "Nothing was kept. Please report this.")
    return json.loads(done.stdout.strip().splitlines()[-1])
