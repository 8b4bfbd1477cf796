"""Verify a result by reloading it with plain libraries in a fresh process, and compare what that finds with the plan.

The same process then runs the source on the same inputs and compares both outputs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from leansurgeon import architectures
from leansurgeon.architectures import infer
from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.foreign import trust
from leansurgeon.checkpoints.kind import classes_of
from leansurgeon.checkpoints.proof.report_numbers import SEEN
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.record import Comparison, Proof
from leansurgeon.checkpoints.source import with_pad_token
from leansurgeon.errors import Diverged, LeanSurgeonError, disk_is_full
from leansurgeon.intervals import paired_interval
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.reading.pooling import read_pooling
from leansurgeon.version import PACKAGE

SCRIPT = Path(__file__).with_name("reload_check.py")
ROOM = 2**29  # bytes of weights in memory at a time, about as much as a blockwise cut needs
EXACT = 1e-4  # relative to the outputs' spread: allowed rounding error of an exact plan in fp32

Families = tuple[Architecture | None, Architecture | None]


def prove(
    folder: Path,
    parameters: int,
    *,
    source: Path | None = None,
    batches: Sequence[dict[str, Any]] | None = None,
    held_out: bool = True,
    kind: str = "plain",
    exact: bool = False,
    families: Families = (None, None),
    origin: Path | None = None,
) -> Proof:
    """Reload `folder` and check its parameter count, missing and unexpected keys, and outputs.

    `source` is the folder to compare with, on `batches` or else on noise. Either model may have been fitted on the
    batches unless they are `held_out`. `exact` says that the plan promises the same function. `families` are those of
    result and source if known, which avoids inferring an undeclared family again. `origin` is what the result was made
    from, even if nothing is compared: the result may lack the tensors that it lacks. Returns what the fresh process
    found, with `compared` if a source was given. Raises `LeanSurgeonError` with the problems found.
    """
    with scratch() as place:
        config = read_config(folder)
        kind_of = config.get("model_type")  # for an undeclared family, the other process could not guess inputs
        unknown = kind_of and (kind_of == infer.DECOUPLED or not architectures.find_declared(config))
        given = batches or ([infer.sample(config)] if unknown else [])
        inputs = place / "inputs.safetensors" if given else None
        if given:
            from safetensors.torch import save_file

            tensors = {f"{i}.{key}": value.contiguous() for i, one in enumerate(given) for key, value in one.items()}
            try:
                save_file(tensors, inputs)
            except Exception as error:
                if disk_is_full(error):
                    said = "The disk of the temporary folder is full."
                    raise LeanSurgeonError(said, "Free some space there.") from None
                raise
            del tensors
        accounts, trouble = run(folder, source, inputs, kind, families)
    if "result" not in accounts:
        raise LeanSurgeonError(f"{folder.name} cannot be reloaded: {trouble}", "Nothing was kept. Please report this.")
    account = accounts["result"]
    original = accounts.get("source")
    if account["missing"] and original is None and origin is not None:
        original = run(folder, origin, None, kind, families)[0].get("source")
    check(account, parameters, (original or {}).get("missing", ()))
    proof = Proof.within(account)
    if source is None:
        return proof
    original = accounts.get("source") or {"trouble": trouble}
    data = ("held-out data" if held_out else SEEN) if batches else "noise"
    return replace(proof, compared=against(original, account, data, exact))


def check(account: JsonObject, parameters: int, lacking: Sequence[str] = ()) -> None:
    """Raise `LeanSurgeonError` if a result does not reload as planned.

    `lacking` are tensors that its source lacks as well and that the library initialises in both (the pooler of an
    encoder that was saved without one).
    """
    problems, missing = [], [name for name in account["missing"] if name not in lacking]
    if missing:
        problems.append(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    else:
        parameters += account.get("missing_parameters", 0)
    if strange := account["unexpected"]:
        problems.append(f"{len(strange)} tensors have no place, the first is {strange[0]}")
    if other := account.get("mismatched"):
        problems.append(f"sizes differ: {other[0]}")
    if account["parameters"] != parameters:
        problems.append(f"the library counts {account['parameters']:,} parameters where the plan has {parameters:,}")
    if not account["finite"]:
        problems.append("the forward pass gives NaN or Inf")
    if problems:
        kind = LeanSurgeonError if account["finite"] else Diverged
        raise kind(
            f"The result does not reload as it should: {'; '.join(problems)}.", "Nothing was kept. Please report this."
        )


def against(original: JsonObject, result: JsonObject, data: str, exact: bool) -> Comparison:
    """Compare the outputs of result and source, given what the fresh process found for each.

    Raises `LeanSurgeonError` if the plan is `exact` and the outputs differ by more than `EXACT` times their spread.
    """
    if "trouble" in original:
        return Comparison(done=False, why=f"the source itself does not load with its library ({original['trouble']})")
    if original["output"] != result["output"]:
        return Comparison(done=False, why=f"the outputs are {result['output']} and the source's {original['output']}")
    if not original["finite"]:
        return Comparison(done=False, why="the source itself gives NaN or Inf")
    scored = {}
    both = {"source": original, "result": result}
    if count := result["count"]:
        pairs = list(zip(original["samples"], result["samples"], strict=True))  # loss, labels, correct answers of each
        weights = [after[1] for _, after in pairs]
        scored = {"scored": count}
        for name, part, key in (("loss", 0, "loss_sum"), ("accuracy", 2, "right")):
            interval = paired_interval([after[part] - before[part] for before, after in pairs], weights)
            bounds = {"low": interval[0], "high": interval[1]} if interval else {}  # none for a single sample
            scored[name] = {of: one[key] / one["count"] for of, one in both.items()} | bounds
    if valued := result["valued"]:
        reached = {of: of_values(one["valued"]) for of, one in both.items()}
        scores = {name: {of: reached[of][name] for of in both} for name in reached["result"]}
        scored |= {"scores": scores, "scored": len(valued)}
    differences = dict(original["differences"])
    if (cosines := differences.pop("cosines", [])) and (interval := paired_interval(cosines)):
        differences["embeddings"] = differences["embeddings"] | {"low": interval[0], "high": min(interval[1], 1.0)}
    comparison = Comparison.within({"done": True, "data": data, **differences, **scored})
    if exact and comparison.max_difference > EXACT * comparison.spread:
        raise LeanSurgeonError(
            f"The plan promises the same function, and outputs differ by {comparison.max_difference:.2g} where their "
            f"spread is {comparison.spread:.2g} ({EXACT:g} of it is allowed).",
            "Nothing was kept. Please report this.",
        )
    return comparison


def of_values(valued: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    """Score outputs against continuous targets or multi-label marks; `valued` is (samples, 2, outputs).

    One output: Spearman's correlation with the target of every sample (0 if either is constant). Several outputs with
    marks of 0 and 1: micro and macro F1.
    """
    import numpy as np
    from scipy.stats import spearmanr
    from sklearn.metrics import f1_score

    said, wanted = np.moveaxis(np.array(valued), 1, 0)
    if said.shape[1] == 1:
        flat = min(np.ptp(said), np.ptp(wanted)) == 0
        return {"Spearman's correlation": 0.0 if flat else float(spearmanr(said[:, 0], wanted[:, 0])[0])}
    kinds = ("micro", "macro")
    return {f"{kind} F1": float(f1_score(wanted > 0, said > 0, average=kind, zero_division=0)) for kind in kinds}


def run(
    folder: Path, source: Path | None, inputs: Path | None, kind: str, families: Families = (None, None)
) -> tuple[JsonObject, str]:
    """Load and run `folder`, then `source`, in a fresh process.

    Returns its findings for both, and the last line of its error output in case it did not finish.
    """
    asked = {
        "result": how_to_load(folder, families[0], as_documented=True),
        "source": source and how_to_load(source, families[1]),
        "inputs": inputs and str(inputs),
        "kind": kind,
        "root": str(PACKAGE.parent),
        "room": ROOM,
    }
    # Isolated mode keeps the working directory off the path. The scratch folder holds modelling files, and weights that
    # the library offloads when not all of them fit in memory.
    with scratch() as cache:
        env = os.environ | {
            "HF_MODULES_CACHE": str(cache),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-I", str(SCRIPT), json.dumps(asked | {"offload": str(cache)})],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )
    accounts = {}
    for line in done.stdout.splitlines():
        if line.startswith(('{"result": ', '{"source": ')):
            accounts |= json.loads(line)
    return accounts, (done.stderr.strip().splitlines() or ["no message"])[-1]


def how_to_load(folder: Path, family: Architecture | None = None, *, as_documented: bool = False) -> JsonObject:
    """Return what `reload_check` needs to load a folder.

    These are the `folder`, the `class`, our `module` that defines it (or registers its timm entry point), whether the
    folder's own code may run (`trust`: the user allowed it), and what the family says of its inputs. A result whose
    modelling file was shipped by this package is loaded `as_documented`, with remote code allowed, unless the folder
    holds other code that the library would then run.

    Raises `UnsupportedModel` if a folder needs code that the user has not allowed.
    """
    how = {"folder": str(folder.absolute())}
    config = read_config(folder)
    known = family is not None and bool(family.evidence)  # a declared family costs nothing to look up again
    architecture = trust.judge_code(family if known else architectures.of(config), config, folder)
    stem = (architecture.modelling or "").removesuffix(".py")
    if architecture.library == "timm":
        ours = str(config.get("architecture", "")).startswith("leansurgeon_")
        return how | ({"module": f"leansurgeon.models.{stem}"} if ours and stem else {})
    config = trust.with_known_classes(config, architecture)
    held, used = classes_of(folder, config, architecture)
    pad = with_pad_token(config, folder, held).get("pad_token_id")
    how |= {"class": held or "AutoModel", "body": used != held, "pad": pad, "pooling": astuple(read_pooling(folder))}
    if architecture.code or (stem and as_documented and not trust.brings_code(folder)):
        how["trust"] = True
    elif stem:
        how["module"] = f"leansurgeon.models.{stem}"
    return how | what_it_takes(architecture, config)


def what_it_takes(architecture: Architecture, config: Config) -> JsonObject:
    """Return what the family says of its inputs, for `reload_check.example`."""
    takes, flat = architecture.takes, architecture.flat(config)
    said = {"tokens": takes.only_tokens(flat), "two_texts": bool(flat.get(takes.second_text))}
    return {key: value for key, value in said.items() if value}
