"""Read how a vision model preprocesses images, as options of the image tasks: size, crop, mean and standard deviation.
transformers stores them next to the weights, in `preprocessor_config.json` or a part of `processor_config.json`, timm
in `pretrained_cfg` of config.json.
"""

from __future__ import annotations

from typing import Any

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel, UsageError, raised_as
from leansurgeon.reading import jsonfile

TaskOptions = dict[str, Any]  # what a recipe has under `task`
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, as transformers writes them


def folder_options(source: Source) -> TaskOptions:
    """Return the options of the image tasks, as a recipe has them under `task`, that reproduce the model's own
    evaluation preprocessing, without augmentation.

    What the model does not specify, such as mean and standard deviation, is left to the task (ImageNet's). Raises
    `UsageError` for a model whose images are not square, and `UnsupportedModel` for damaged settings.
    """
    try:
        options = of_timm(source) if source.architecture.library == "timm" else of_transformers(source)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise UnsupportedModel(f"What {source.name} says of its images cannot be read: {error}.") from None
    flat = source.flat_config
    options = {"augment": False} | options | {"channels": flat.get("num_channels", flat.get("in_chans")) or 3}
    size = options["image_size"]  # one side of a square, or height and width
    if isinstance(size, list | tuple):
        if len(set(size)) > 1:
            sides = " x ".join(map(str, size))
            raise UsageError(
                f"{source.name} takes images of {sides}, and images of a folder are made square.", "Give task:NAME."
            )
        options["image_size"] = size[0]
    return {key: value for key, value in options.items() if value is not None}


def of_timm(source: Source) -> TaskOptions:
    """Return size, crop, mean and standard deviation of a timm model's `pretrained_cfg`; None where unspecified."""
    cfg = source.config.get("pretrained_cfg") or source.config
    sides = cfg.get("input_size")
    size = source.flat_config.get("img_size") or (sides[1:] if isinstance(sides, list) else sides)
    said = {key: cfg.get(key) for key in ("crop_pct", "interpolation", "mean", "std")}
    return {"image_size": size, **said, "interpolation": said["interpolation"] or None}


def of_transformers(source: Source) -> TaskOptions:
    """Return the same from an image processor: images are scaled until the shortest edge fits, then cropped."""
    said = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = source.folder / name if source.folder else None
        if not said and file and file.exists():
            with raised_as(UnsupportedModel):
                read = jsonfile.read_object(file)
            part = read.get("image_processor", {}) if name == "processor_config.json" else read
            said = part if isinstance(part, dict) else {}
    resized, cropped = (sides(said.get(key)) for key in ("size", "crop_size"))
    cropped = cropped if said.get("do_center_crop") else None
    flat = source.flat_config
    size = flat.get("image_size")
    if size is None or source.architecture.takes.any_image_size:
        size = cropped or resized or size
    crop_pct = None
    if said:
        # A processor without a crop resizes the whole image; the task's crop then takes everything.
        crop_pct = min(1.0, cropped[0] / resized[0]) if cropped and resized else 1.0
    # For pixels in 0..1, the model's input is (pixel - mean) / std; both None if the processor does not say.
    channels, both = flat.get("num_channels") or 3, (said.get("image_mean"), said.get("image_std"))
    if said.get("do_normalize") is False:
        both = (0.0, 1.0)
    # The processor multiplies bytes by 1/255 before normalization, unless its settings say otherwise.
    scale = 255 * ((said.get("rescale_factor") or 1 / 255) if said.get("do_rescale", True) else 1)
    mean, std = (
        None if None in both else [one / scale for one in (value if isinstance(value, list) else [value] * channels)]
        for value in both
    )
    interpolation = RESAMPLE.get(said.get("resample"))
    return {"image_size": size, "crop_pct": crop_pct, "interpolation": interpolation, "mean": mean, "std": std}


def sides(size: object) -> list[int] | None:
    """Return [height, width] of a processor's size: a number, height and width, or the shortest edge."""
    if isinstance(size, dict):
        edge = size.get("shortest_edge")
        size = [size.get("height", edge), size.get("width", edge)]
    elif isinstance(size, int):
        size = [size, size]
    return list(size) if isinstance(size, list) and all(isinstance(side, int) for side in size) and size else None
