"""What a checkpoint defines and a recipe must not silently replace: its tokenizer and its image preprocessing.

With another tokenizer than the one its embeddings were trained with, a model trains without complaint on the wrong
tokens. Such a tokenizer is refused, unless `train.new_tokenizer` asks for new embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from leansurgeon import architectures
from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.checkpoints.source import complete, open_source
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.measure.data import images
from leansurgeon.measure.data.choose_task import brings_tokenizer
from leansurgeon.progress import Say
from leansurgeon.reading import names
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.tasks.text import vocab
from leansurgeon.training.runs import folder as runfolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from leansurgeon.tasks import Task
    from leansurgeon.training.recipe.schema import TrainingRecipe

IMAGE_TASKS = ("folder", "imagenet", "images")
OWN = ("mean", "std", "crop_pct", "interpolation")  # preprocessing that a processor defines


class Refused(UsageError):
    """The tokenizer does not fit the model, whatever the data."""


def image_options(recipe: TrainingRecipe, model_dir: Path, say: Say) -> JsonObject:
    """Return the options of the recipe's task, with the image size and channels that the model takes.

    A checkpoint from elsewhere also keeps the preprocessing of its own processor where the recipe does not set it.
    """
    given = recipe.task.options
    if recipe.task.name not in IMAGE_TASKS or not (model_dir / "config.json").is_file():
        return given
    try:
        source = open_source(str(model_dir))
        wanted = images.folder_options(source)
    except LeanSurgeonError:
        return given  # loading the model will report it
    mended = dict(given)
    for key in ("image_size", "channels"):
        asked, has = given.get(key), wanted.get(key)
        if has and asked != has:
            mended[key] = has
            if asked is not None:
                say(f"The recipe says {key} {asked}, but the model takes {has}: using {has}.")
    if mended.get("channels") != given.get("channels", 3):
        mended = {key: value for key, value in mended.items() if key not in ("mean", "std")}
    # Trained elsewhere, not by a preset's recipe here.
    if source.learned and source.preset is None and not runfolder.is_trained(model_dir):
        mended |= {key: wanted[key] for key in OWN if key in wanted and key not in given}
    return mended


def check_tokenizer(recipe: TrainingRecipe, task: Task, model_dir: Path) -> None:
    """Raise `Refused` if the tokenizer is not the one of the model's learned embeddings, or has more tokens than the
    model.
    """
    choice = getattr(task.options, "tokenizer", None)
    if choice is None or not (model_dir / "config.json").is_file():
        return
    if recipe.train.new_tokenizer:
        if choice == "model":
            raise Refused(
                "--new-tokenizer needs another tokenizer, but the task's is the model's own.",
                "Name another: --set task.tokenizer=bpe (char, byte, wordpiece, FOLDER/, hub:NAME).",
            )
        return
    tokenizer = task.tokenizer()
    if choice == "model":
        config = complete(read_config(model_dir))
        rows = architectures.of(config).flat(config).get("vocab_size")
        ids = vocab.count_ids(tokenizer)
        needed = ids - (tokenizer.pad_token_id == ids - 1)  # a pad token after all others needs no row
        if isinstance(rows, int) and rows and needed > rows:
            raise Refused(
                f"The tokenizer in {model_dir} has {needed:,} tokens, and the model's vocabulary {rows:,}.",
                "They do not belong together: use the tokenizer that the model was trained with.",
            )
        return
    if not runfolder.has_learned(model_dir) or not brings_tokenizer(model_dir):
        return
    own = vocab.load(model_dir)
    if not vocab.same_tokens(own, tokenizer):
        raise Refused(
            f"The recipe's tokenizer ({choice}, {len(tokenizer):,} tokens) is not the one that the embeddings of "
            f"{model_dir} belong to ({len(own):,} tokens).",
            "Take the model's own: --set task.tokenizer=model. Or reinitialise the embeddings: --new-tokenizer.",
        )


def load_start(recipe: TrainingRecipe, model_dir: Path, task: Task) -> Loaded:
    """Load the model for the recipe's task, with a new head or new embeddings where the recipe wants them. These are
    the same on every process and in every repetition.
    """
    torch.manual_seed(recipe.train.seed)
    overrides, train = task.model_overrides(), recipe.train
    size = overrides.pop("vocab_size", None) if train.new_tokenizer else None
    model = load(model_dir, task.head, overrides)
    if train.new_tokenizer:
        embeddings_anew(model, task.tokenizer(), size)
    if train.new_head:
        head_anew(model, getattr(task.options, "class_names", None) or task.data_classes or ())
    return model


def head_anew(loaded: Loaded, names: Sequence[str]) -> None:
    """Give the model a freshly initialized head for these classes, even if it already has as many."""
    model = loaded.model
    if loaded.architecture.library == "timm":
        model.reset_classifier(len(names) or model.num_classes)
        loaded.config = {key: value for key, value in loaded.config.items() if not key.startswith("label_")}
        loaded.config |= {"label_names": list(names)} if names else {}
        return
    for part in (part for name, part in model.named_children() if name != model.base_model_prefix):
        for parameter in part.parameters():
            parameter._is_hf_initialized = False  # else transformers skips it
        part.apply(model._init_weights)
    if not names:
        return
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: number for number, name in enumerate(names)}
    loaded.config |= {"id2label": dict(model.config.id2label), "label2id": dict(model.config.label2id)}


@torch.no_grad()
def embeddings_anew(loaded: Loaded, tokenizer: PreTrainedTokenizerBase, size: int | None) -> None:
    """Give the model fresh embeddings of the tokenizer's size, and the tokenizer's special tokens."""
    model, std = loaded.model, loaded.init_std or 0.02
    if not hasattr(model, "resize_token_embeddings"):
        raise UsageError(f"{type(model).__name__} has no embeddings of tokens.", "Leave --new-tokenizer out.")
    model.resize_token_embeddings(size or vocab.count_ids(tokenizer), mean_resizing=False)
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    inner.weight.normal_(0.0, std)
    if outer is not None and outer.weight is not inner.weight:
        outer.weight.normal_(0.0, std)
    if getattr(outer, "bias", None) is not None:
        outer.bias.zero_()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    for place in (model.config, getattr(model, "generation_config", None)):
        for key, value in special.items() if place is not None else ():
            setattr(place, key, value)
    loaded.config = model.config.to_dict() | {"architectures": [type(model).__name__]}


def replace_tokenizer(folder: Path, loaded: Loaded, task: Task, *, anew: bool) -> None:
    """In a folder that was just saved, replace the source's tokenizer by the task's: for new embeddings (`anew`), or if
    the source had no tokenizer or was untrained.
    """
    tokenizer = task.tokenizer()
    kept = runfolder.has_learned(loaded.folder) and brings_tokenizer(loaded.folder)
    if tokenizer is None or (not anew and (kept or getattr(task.options, "tokenizer", None) == "model")):
        return
    companions.remove(folder, (*names.TOKENIZER, *names.TEMPLATES))
    tokenizer.save_pretrained(folder)
    if anew and (folder / names.GENERATION).exists():
        loaded.model.generation_config.save_pretrained(folder)
