"""Somebody's own tiny models and data, and the models cut to half their layers, for the tests of healing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.conftest import build
from tests.support.command_line import Done, leansurgeon
from tests.support.models.word_models import WORDS, words


def texts(folder: Path, lines: int = 120) -> Path:
    """A folder of two text files, one of them further down."""
    rng = np.random.default_rng(0)
    (folder / "more").mkdir(parents=True)
    for name in ("a.txt", "more/b.md"):
        (folder / name).write_text("\n".join(" ".join(rng.choice(WORDS, rng.integers(8, 20))) for _ in range(lines)))
    return folder


def reviews(file: Path, rows: int = 96, names: tuple[str, ...] = ("bad", "good")) -> Path:
    """A table of texts whose class is that of their first word."""
    rng = np.random.default_rng(1)
    lines = ["stars,review"]
    for row in range(rows):
        first = WORDS[row % len(names)]
        lines.append(f"{names[row % len(names)]},{first} {' '.join(rng.choice(WORDS[10:], 6))}")
    file.write_text("\n".join(lines) + "\n")
    return file


def pictures(folder: Path, names: tuple[str, ...] = ("ant", "bee"), each: int = 24, side: int = 12) -> Path:
    """Class folders of small grey images, dark and light."""
    from PIL import Image

    rng = np.random.default_rng(2)
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            low = 200 * number // max(1, len(names) - 1)
            Image.fromarray(rng.integers(low, low + 50, (side, side, 3), dtype=np.uint8)).save(
                folder / name / f"{i}.png"
            )
    return folder


def model(folder: Path, family: str, **changes) -> Path:
    """A random model of a family, with a tokenizer of single words if it reads."""
    made = build(family, **changes)
    made.save_pretrained(folder)
    if made.main_input_name == "input_ids":
        words(folder)
    return folder


def encoder(folder: Path, **changes) -> Path:
    """A BERT without a head."""
    import torch
    import transformers

    torch.manual_seed(1)
    transformers.BertModel(build("bert", **changes).config).save_pretrained(folder)
    words(folder)
    return folder


def classifier(folder: Path, names: tuple[str, ...]) -> Path:
    """A BERT that tells classes of texts apart."""
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, vocab_size=61,
        max_position_embeddings=40, initializer_range=0.3, id2label=dict(enumerate(names)),
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    words(folder)
    return folder


def processor(folder: Path, size: int, channels: int) -> Path:
    """How the model in `folder` wants its images."""
    said = {"do_resize": True, "size": {"height": size, "width": size}, "do_normalize": True, "do_rescale": True}
    said |= {"image_mean": [0.3] * channels, "image_std": [0.2] * channels, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return folder


def timm_vit(folder: Path, classes: int, names: tuple[str, ...] = ("ant", "bee")) -> Path:
    """A small timm ViT as `save_for_hf` writes it, with these names where it has as many classes."""
    import timm
    import torch
    from timm.models import save_for_hf

    torch.manual_seed(4)
    args = dict(img_size=16, patch_size=4, embed_dim=24, depth=4, num_heads=4, num_classes=classes)
    made = timm.create_model("vit_tiny_patch16_224", **args)
    save_for_hf(made, str(folder), model_config=dict(num_classes=classes, model_args=args), safe_serialization=True)
    if len(names) == classes:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"label_names": names}))
    return folder


def halved(folder: Path, source: Path) -> Path:
    """The source cut to its first and third layer, as `shrink` does it."""
    done = leansurgeon("shrink", source, "--keep", "0,2", "--uncalibrated", "--no-proof", "-o", folder)
    assert done.returncode == 0, done.stderr
    return folder


def healed(model: Path, data: object, run: Path, *more: object) -> Done:
    """`retrain MODEL --data DATA`, for two steps unless `more` says otherwise."""
    return leansurgeon("retrain", model, "--data", data, "-o", run, "--set", "train.duration=2st", *more)
