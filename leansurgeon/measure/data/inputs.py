"""Make up batches of the size that a model takes, and a loss for its output: for counting and timing only. Imports
torch inside functions; sizes are read from the config without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.towers import writes_text
from leansurgeon.errors import UnsupportedModel, UsageError

if TYPE_CHECKING:
    import torch

LONGEST = 1024  # default tokens for models that take more


def takes_images(config: Config, architecture: Architecture) -> bool:
    """Return whether the model's inputs are pixels."""
    flat = architecture.flat(config)
    return architecture.library == "timm" or any(key in flat for key in ("patch_size", "num_channels"))


def sample_tokens(asked: int | None, config: Config, architecture: Architecture) -> int:
    """Return the tokens of a text sample: as requested, else as many as the model has positions for, at most 1024. 1
    for models that take images, whose tokens follow from their size. Raises `UsageError` if the model does not take as
    many.
    """
    if takes_images(config, architecture):
        if asked not in (None, 1):
            raise UsageError(f"--tokens {asked:,}: this model takes images, whose tokens follow from their size.")
        return 1
    if asked is None:
        only, most = room(config, architecture)
        return only or min(LONGEST, most or LONGEST)
    if takes := describe_limit(asked, config, architecture):
        raise UsageError(f"--tokens {asked:,}: this model takes {takes} tokens.", f"Give {takes}.")
    return asked


def room(config: Config, architecture: Architecture) -> tuple[int | None, int | None]:
    """Return the only number of tokens that a model takes, and the most it has positions for; None for no limit."""
    flat = architecture.flat(config)
    most = architecture.takes.most_tokens(flat)
    return architecture.takes.only_tokens(flat), most and most - architecture.skipped_positions


def describe_limit(tokens: int, config: Config, architecture: Architecture) -> str:
    """Return `at most 512` if a model does not take this many tokens of text; empty if it does."""
    only, most = room(config, architecture)
    fits = tokens == only if only else not most or tokens <= most
    return "" if fits else f"exactly {only:,}" if only else f"at most {most:,}"


def image_size(config: Config, architecture: Architecture) -> tuple[int, int, int]:
    """Return channels, height and width of the images that the model takes."""
    flat = architecture.flat(config)
    size = flat.get("image_size", flat.get("img_size", 224))
    height, width = (size, size) if isinstance(size, int) else size
    return flat.get("num_channels", flat.get("in_chans", 3)), height, width


def make(
    config: Config, architecture: Architecture, batch: int, tokens: int, device: str | torch.device
) -> dict[str, torch.Tensor]:
    """Make model inputs of `batch` samples; text is `(batch, tokens)` without padding. Raises `UnsupportedModel` if no
    sample can be made up, as for a model that needs the inputs of all its towers at once.
    """
    import torch

    cls = (config.get("architectures") or [""])[0]
    if architecture.section and not writes_text(architecture.section, cls):
        raise UnsupportedModel(
            f"{cls or architecture.name} needs the inputs of several towers at once, and no such sample can be made up "
            "here, so neither memory nor time can be predicted.",
            "`leansurgeon plan` without a training counts parameters before and after.",
        )
    flat = architecture.flat(config)
    if takes_images(config, architecture):
        return {"pixel_values": torch.zeros(batch, *image_size(config, architecture), device=device)}
    if not isinstance(flat.get("vocab_size"), int):
        raise UnsupportedModel(
            f"{architecture.name} takes neither images nor tokens, so no sample can be made up for it.",
            "Parameters are shown by `leansurgeon inspect`.",
        )
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
    if flat.get("is_encoder_decoder") and architecture.stages[-1].keys and len(architecture.stages) > 1:
        return {"input_ids": ids, "decoder_input_ids": ids.clone()}
    if flat.get(architecture.takes.second_text):
        return {"input_ids": ids, "input_ids_2": ids.clone()}
    return {"input_ids": ids}


def run(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the model's output: logits `(batch, classes)` or `(batch, tokens, vocab)`, or its last hidden state."""
    import torch

    said = model(**inputs) if hasattr(model, "config") else model(inputs["pixel_values"])
    if isinstance(said, torch.Tensor):
        return said
    logits = getattr(said, "logits", None)
    return said[0] if logits is None else logits


def loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in fp32 against made-up labels: cross-entropy as in the tasks; without a head, squares."""
    import torch

    from leansurgeon.tasks.base import classification_score, token_score  # imports numpy, which a report does not need

    if logits.shape[-1] < 2:
        return logits.float().square().mean()
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    score = (classification_score if logits.dim() == 2 else token_score)(logits, labels)
    return score.loss_sum / score.loss_count.clamp(min=1)
