"""Run tasks of lm-evaluation-harness on a result and its source: on the same documents, so that scores can be paired.
Needs the extra `lm-eval`. The harness loads both models with plain transformers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints.proof.prove import how_to_load
from leansurgeon.checkpoints.record import Comparison, PairedFigure
from leansurgeon.errors import UsageError
from leansurgeon.intervals import paired_interval
from leansurgeon.progress import Say
from leansurgeon.reading import files
from leansurgeon.tasks.text import vocab

LIMIT = 2**20  # maximum bytes of a task's file
KEPT = "lm-eval "  # prefix of a task's name among other data

Scores = dict[str, dict[int, tuple[float, float]]]  # metric -> document -> sum and weight


def split_task_names(tasks: str) -> tuple[list[str], list[str]]:
    """Parse `arc_easy,my_task.yaml` into names of tasks, and the folders of the user's own tasks. Raises `UsageError`
    for a file that does not exist or names no task.
    """
    names, folders = [], []
    for word in filter(None, (word.strip() for word in tasks.split(","))):
        if not word.endswith((".yaml", ".yml")):
            names.append(word)
            continue
        match = re.search(r"^task:\s*[\"']?([\w.-]+)", files.read_text(Path(word), LIMIT), re.MULTILINE)
        if match is None:
            raise UsageError(f"{word} names no task of lm-evaluation-harness.", "It needs a line such as `task: mine`.")
        names.append(match[1])
        folders.append(str(Path(word).resolve().parent))
    if not names:
        raise UsageError("--lm-eval names no task.", "Give names such as arc_easy, or a task's YAML file.")
    return names, list(dict.fromkeys(folders))


def judge_tasks(tasks: str, source: Path, result: Path, *, limit: int | None, say: Say) -> dict[str, Comparison]:
    """Compare both models by every metric of every task, with the interval of the difference. `limit` takes only the
    first documents of each task. Raises `UsageError` if the harness is not installed, does not know a task or cannot
    get its data.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UsageError(
            "--lm-eval needs lm-evaluation-harness.", "Install it: pip install 'leansurgeon[lm-eval]'."
        ) from None
    import torch

    device = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    names, folders = split_task_names(tasks)
    known = TaskManager(include_path=folders or None)
    if unknown := [name for name in names if name not in known.all_tasks]:
        raise UsageError(f"lm-evaluation-harness knows no task {unknown[0]!r}.", "`lm-eval ls tasks` lists them.")
    by_model = []
    for what, folder in (("the source", source), ("the result", result)):
        say(f"lm-eval on {what}: {', '.join(names)} ...")
        arguments = {"pretrained": str(folder), "dtype": "float32"}
        if how_to_load(folder, as_documented=True).get("trust"):
            arguments["trust_remote_code"] = True
        if vocab.beginning(vocab.own(folder)):
            arguments["add_bos_token"] = True
        with redirect_stdout(sys.stderr):  # stdout is for results, and these are not final
            done = simple_evaluate(
                "hf",
                model_args=arguments,
                tasks=names,
                task_manager=known,
                limit=limit,
                bootstrap_iters=0,
                batch_size=8,
                device=device,
            )
        by_model.append({name: scores(samples) for name, samples in done["samples"].items()})
    before, after = by_model
    return {KEPT + name: compare_metrics(before[name], after[name]) for name in before}


def scores(samples: Sequence[Mapping[str, Any]]) -> Scores:
    """Return the sum and weight of every metric of every document. A weighted metric of the harness (perplexity) is a
    pair of log-likelihood and words or bytes; it becomes a loss in nats.
    """
    by_metric = {}
    for sample in samples:
        for name in sample["metrics"]:
            value = sample[name]
            if isinstance(value, (list, tuple)) and len(value) == 2:
                by_metric.setdefault(f"{name}, as nats", {})[sample["doc_id"]] = (-float(value[0]), float(value[1]))
            elif isinstance(value, (int, float)):
                by_metric.setdefault(name, {})[sample["doc_id"]] = (float(value), 1.0)
    return by_metric


def compare_metrics(before: Scores, after: Scores) -> Comparison:
    """Compare each metric of both, with the interval of the difference over documents."""
    scores_of_both, documents = {}, 0
    for name, old in before.items():
        both = [(old[i], after[name][i]) for i in sorted(old) if i in after.get(name, {})]
        if not both:
            continue
        weights = [a[1] for a, _ in both]
        around = paired_interval([b[0] - a[0] for a, b in both], weights)
        means = [sum(pair[side][0] for pair in both) / sum(weights) for side in (0, 1)]
        scores_of_both[name] = PairedFigure(*means, *(around or (None, None)))
        documents = max(documents, len(both))
    return Comparison(data="lm-eval", scores=scores_of_both, scored=documents)
