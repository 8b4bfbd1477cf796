"""Find real samples on which models differ: held-out samples that they answer differently, prompts that each continues,
masked words that each fills in, sentences with other nearest neighbors. Imports torch.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leansurgeon.checkpoints.kind import LANGUAGE
from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.progress import quiet_transformers
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.tasks import Task, make
from leansurgeon.tasks.base import IGNORED
from leansurgeon.tasks.text import vocab
from leansurgeon.training.recipe.schema import TaskChoice

NAME = "changes.json"  # beside the runs of an experiment
MOST, SHOWN, BATCH = 512, 12, 16  # samples compared, samples shown, batch size
PROMPTS, PROMPT, CONTINUED = 4, 24, 32  # number of texts to continue, prompt tokens, new tokens
FILLED = 48  # tokens per text with masks to fill in
LETTERS = 400  # characters shown per text
CLASSES = 20  # most classes for which a confusion matrix is shown


def find_changes(choice: TaskChoice, models: Mapping[str, Path]) -> JsonObject:
    """Return samples on which the models differ, with each model's answer, as a JSON document.

    Its `kind` is "classes", "texts", "masks" or "neighbours". The first model is the original. Empty for tasks whose
    samples a person cannot read.
    """
    folder = next(iter(models.values()))
    task = make(choice.name, choice.options)
    task.prepare(cache_folder(), folder, workers=1, say=lambda _: None)
    split = "test" if "test" in task.splits else "eval"
    rows = np.linspace(0, task.size(split) - 1, min(MOST, task.size(split))).round().astype(int)
    with quiet_transformers(), torch.inference_mode():
        loaded = {name: load(path, task.head, task.model_overrides()) for name, path in models.items()}
        for one in loaded.values():
            one.model.eval()
        if task.head == "causal-lm":
            return continue_texts(task, split, rows[:: max(1, len(rows) // PROMPTS)][:PROMPTS], loaded, folder)
        batches = [task.batch(split, rows[i : i + BATCH], seed=0, epoch=0) for i in range(0, len(rows), BATCH)]
        if task.head in LANGUAGE:
            return fill_masks(batches, loaded, folder)
        if task.head == "features":
            return compare_neighbours(task, batches, loaded, folder)
        return compare_answers(batches, loaded, folder)


def find_differing(answers: Mapping[str, Tensor]) -> Tensor:
    """Return where any of the answers is not the first one's."""
    first, *others = answers.values()
    return torch.stack([other != first for other in others or [first]]).any(0)


def compare_answers(batches: list[Any], loaded: Mapping[str, Loaded], folder: Path) -> JsonObject:
    """Return samples on which classifiers differ, those that the original got right first, and, if there are not too
    many classes, the confusion matrices.
    """
    truth = torch.cat([batch["labels"] for batch in batches])
    if truth.is_floating_point() or truth.ndim > 1:
        return {}
    answers = {name: torch.cat([one.forward(batch).argmax(-1) for batch in batches]) for name, one in loaded.items()}
    first, differ = next(iter(answers.values())), find_differing(answers)
    order = sorted(differ.nonzero()[:, 0].tolist(), key=lambda i: (bool(first[i] != truth[i]), i))
    config = next(iter(loaded.values())).config
    size = 1 + max(int(found.max()) for found in (truth, *answers.values()))
    names = config.get("id2label") or {}
    classes = [str(names.get(str(i), names.get(i, i))) for i in range(size)]
    show, shown, confusion = Samples(batches, folder), [], {}
    for i in order[:SHOWN]:
        given = {name: classes[int(found[i])] for name, found in answers.items()}
        shown.append(show(i) | {"truth": classes[int(truth[i])], "answers": given})
    for name, found in answers.items() if size <= CLASSES else ():
        counts = torch.bincount(truth * size + found, minlength=size * size)
        confusion[name] = counts.reshape(size, size).tolist()
    known = {"classes": classes, "confusion": confusion}
    return {"kind": "classes", "samples": len(truth), "differ": len(order), "shown": shown} | known


def compare_neighbours(task: Task, batches: list[Any], loaded: Mapping[str, Loaded], folder: Path) -> JsonObject:
    """Return sentences whose nearest neighbor differs from the original's, the closest pairs first."""
    nearest, near = {}, None
    for name, one in loaded.items():
        pooled = torch.cat([one.pooling.pool(one.features(batch), task.token_mask(batch)) for batch in batches])
        cosines = torch.nn.functional.normalize(pooled.float(), dim=-1)
        cosines = (cosines @ cosines.T).fill_diagonal_(-2)
        nearest[name] = cosines.argmax(-1)
        near = cosines.max(-1).values if near is None else near
    differ = find_differing(nearest)
    order = sorted(differ.nonzero()[:, 0].tolist(), key=lambda i: -float(near[i]))
    show = Samples(batches, folder)
    shown = [
        show(i) | {"answers": {name: show(int(found[i])).get("text", "") for name, found in nearest.items()}}
        for i in order[:SHOWN]
    ]
    return {"kind": "neighbours", "samples": len(differ), "differ": len(order), "shown": shown}


def continue_texts(task: Task, split: str, rows: np.ndarray, loaded: Mapping[str, Loaded], folder: Path) -> JsonObject:
    """Continue the beginnings of held-out texts with each model's most likely tokens."""
    tokenizer = vocab.load(folder)
    ids = task.batch(split, rows, seed=0, epoch=0)["input_ids"][:, :PROMPT]
    answers: dict[str, list[str]] = {}
    for name, one in loaded.items():
        tokens = ids
        for _ in range(CONTINUED):
            logits = one.forward({"input_ids": tokens})
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
        answers[name] = tokenizer.batch_decode(tokens[:, PROMPT:], skip_special_tokens=True)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    shown = [
        {"text": text, "answers": {name: found[i] for name, found in answers.items()}} for i, text in enumerate(texts)
    ]
    return {"kind": "texts", "samples": len(texts), "differ": len(texts), "shown": shown}


def fill_masks(batches: list[Any], loaded: Mapping[str, Loaded], folder: Path) -> JsonObject:
    """Return beginnings of held-out texts with masked tokens that the models fill in differently."""
    tokenizer = vocab.load(folder)
    ids, labels = (torch.cat([batch[key] for batch in batches])[:, :FILLED] for key in ("input_ids", "labels"))
    hidden = ids == tokenizer.mask_token_id
    # tokens that were replaced or kept, not masked, appear as they are
    ids = torch.where((labels != IGNORED) & ~hidden, labels, ids)
    filled = {name: torch.cat([one.forward({"input_ids": part}).argmax(-1) for part in ids.split(BATCH)])
              for name, one in loaded.items()}  # fmt: skip
    differ = (find_differing(filled) & hidden).any(1)

    def words(tokens: Tensor, row: int) -> str:
        return " | ".join(tokenizer.decode(token).strip() for token in tokens[row][hidden[row]])

    shown = [
        {"text": tokenizer.decode(ids[row]), "truth": words(labels, row)}
        | {"answers": {name: words(found, row) for name, found in filled.items()}}
        for row in differ.nonzero()[:SHOWN, 0].tolist()
    ]
    return {"kind": "masks", "samples": len(ids), "differ": int(differ.sum()), "shown": shown}


class Samples:
    """Samples of batches as a person sees them: text, or a small picture as a data URL."""

    def __init__(self, batches: list[Any], folder: Path) -> None:
        self.batches = batches
        self.tokenizer = vocab.load(folder) if "input_ids" in batches[0] else None

    def __call__(self, number: int) -> JsonObject:
        batch, row = self.batches[number // BATCH], number % BATCH
        if self.tokenizer is not None:
            text = self.tokenizer.decode(batch["input_ids"][row], skip_special_tokens=True)
            return {"text": text if len(text) <= LETTERS else f"{text[:LETTERS]} ..."}
        from PIL import Image

        pixels = batch["pixel_values"][row].float()
        low, high = pixels.min(), pixels.max()
        grey = ((pixels - low) / (high - low).clamp(min=1e-9) * 255).round().byte().permute(1, 2, 0).numpy()
        image = Image.fromarray(grey[..., 0] if grey.shape[-1] == 1 else grey)
        image.thumbnail((96, 96))
        file = io.BytesIO()
        image.save(file, "PNG")
        return {"image": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}
