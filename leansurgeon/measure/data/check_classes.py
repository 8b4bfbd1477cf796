"""Check that a trained head agrees with the data at all, before anything is cut, ranked or healed by labels that may be
in another order than its outputs.
"""

from __future__ import annotations

import os

import numpy as np

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.tasks import Task
from leansurgeon.tasks.classes import NAMED, ClassMap

LEAST, MOST = 50, 200  # held-out samples
LEVEL = 0.05  # agreement reached more often than this by shuffled labels counts as chance
BETTER, SURE = 0.15, 0.001  # another order must be right more often by this share, at this level of McNemar's test
SHUFFLES = 999


def check_classes(source: Source, task: Task, found: ClassMap | None, *, chance: bool) -> None:
    """Check the source's predictions on held-out samples of the prepared task, whose classes are its outputs as `found`
    says. Without `chance`, only another order of the classes is an error, as for a model that a cut may have ruined.

    Skipped if the user named the classes, with fewer than LEAST samples, or without memory for the model. Raises
    `UsageError` if predictions agree with the labels no better than with shuffled ones (shuffling keeps the class
    frequencies, so always predicting the largest class is chance), or if another order, found on one half of the
    samples, fits the other half far better.
    """
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    heard = source.learned and source.folder is not None and 8 * source.parameters.total < whole
    if getattr(task, "objective", "class") != "class" or found is None or found.new_head or NAMED.get() or not heard:
        return
    splits = sorted({"eval", *task.splits} - {"train"})
    held = [(split, row) for split in splits for row in range(task.size(split))]
    if len(held) < LEAST:
        return
    import torch
    from scipy.optimize import linear_sum_assignment
    from scipy.stats import binomtest
    from sklearn.metrics import confusion_matrix

    from leansurgeon.checkpoints.model import load

    chosen = [held[i] for i in np.random.default_rng(0).permutation(len(held))[:MOST]]
    loaded = load(source.folder)
    loaded.model.eval()
    answers, labels = [], []
    for split, row in chosen:
        batch = task.batch(split, np.array([row]), seed=0, epoch=0)
        with torch.no_grad():
            answers.append(int(loaded.forward(batch).argmax(-1)))
        labels.append(int(batch["labels"]))
    answers_N, labels_N = np.array(answers), np.array(labels)
    right = answers_N == labels_N
    told = f"{source.name} is right on {right.sum()} of {len(right)} held-out samples"
    hint = (
        "Say which output is which: --classes A,B,C (task.class_names in a recipe), the data's classes in the order of "
        "the outputs. To go on with the present order, give it. --classes new trains a new head."
    )
    # For each half, the output of each sample's class under the order that fits the other half best.
    size, half = int(max(answers_N.max(), labels_N.max())) + 1, np.arange(len(labels_N)) % 2
    other_N = labels_N.copy()
    for part in (0, 1):
        counts = confusion_matrix(labels_N[half != part], answers_N[half != part], labels=np.arange(size))
        # On ties, the order nearest to the given one.
        order = linear_sum_assignment(counts + 1e-3 * np.eye(size), maximize=True)[1]
        other_N[half == part] = order[labels_N[half == part]]
    other = other_N == answers_N
    won, lost = int((other & ~right).sum()), int((right & ~other).sum())
    more = (won - lost) / len(right)
    if more > BETTER and binomtest(won, won + lost, alternative="greater").pvalue < SURE:
        raise UsageError(
            f"{told}, and with another order of the classes it would be on {other.sum()}. {found.says}", hint
        )
    rng = np.random.default_rng(0)
    as_good = sum((answers_N == rng.permutation(labels_N)).sum() >= right.sum() for _ in range(SHUFFLES))
    if chance and (1 + as_good) / (1 + SHUFFLES) > LEVEL:
        raise UsageError(f"{told}, no better than chance. {found.says}", hint)
