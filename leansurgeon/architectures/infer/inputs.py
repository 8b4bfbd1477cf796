"""Small inputs of every kind that the library's models accept.

In models that read images or sound beside text, features of one kind replace placeholder tokens. How many tokens an
image takes depends on the model, so it is measured: a small model with the image's real geometry computes its features,
and these are counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.architectures.tensors import Config

TOKENS = 15
VOCAB = 200  # size of a small model's vocabulary, larger than its other sizes, as in real models
IMAGE_TOKENS = ("image_token_id", "image_token_index")
AUDIO_TOKENS = ("audio_token_id", "audio_token_index")
SAMPLES = 2
EDGE = 4  # merged patches per side of an image whose size is free
Noise = Callable[..., Tensor]


def example(model: nn.Module | type[nn.Module], config: Config, seed: int = 0, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Return inputs that a model (or its class) runs on, according to its main input and forward signature.

    `config` gives the image size and the tokens that stand for images; the number of features of such an image is taken
    from the model itself, which may be smaller than the config's.
    """
    generator = torch.Generator().manual_seed(seed)
    takes = dict(inspect.signature(model.forward).parameters)
    takes.pop("self", None)
    main = getattr(model, "main_input_name", "input_ids")
    main = main if main in takes else next(iter(takes))
    inputs = {}

    def ids() -> Tensor:
        return apart(torch.randint(10, vocab - 10, (2, TOKENS), generator=generator), config)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if "spatial_shapes" in takes and "pixel_attention_mask" in takes:
        inputs |= patches(config, noise)
    elif "grid_thw" in takes:
        inputs[next(iter(takes))], inputs["grid_thw"] = grid(config, noise)
        if "merge_sizes" in takes:
            inputs["merge_sizes"] = torch.ones(len(inputs["grid_thw"]), dtype=torch.int64)
    elif main in ("pixel_values", "pixel_values_videos", "images"):
        inputs[main] = noise(*image_size(config))
    elif main == "input_values":
        sound = (config.get("max_length", 64), config.get("num_mel_bins", 16))
        inputs[main] = noise(2, *((2000,) if "conv_dim" in config or "conv_kernel" in config else sound))
    elif main == "input_features":
        inputs[main] = features(config, noise)
    elif main == "inputs_embeds":
        inputs[main] = noise(2, TOKENS, config.get("hidden_size") or 96)
    else:
        inputs["input_ids" if "input_ids" in takes else main] = ids()
    text, vision, audio = (config.get(f"{tower}_config") for tower in ("text", "vision", "audio"))
    # Models that match images or sounds with texts: two towers, and both need inputs.
    paired = text and ("projection_dim" in config or "return_loss" in takes)
    if paired and vision and "pixel_values" in takes and "pixel_values" not in inputs:
        inputs["pixel_values"] = noise(*image_size(vision))
    if paired and audio and "input_features" in takes:
        inputs["input_features"] = features(audio, noise)
    if text and main != "input_ids" and "input_ids" in takes:
        inputs["input_ids"] = ids()
    if isinstance(model, nn.Module) and several_kinds(model, config):
        inputs = join_features(model, config, takes, ids(), noise)
    if "noise" in takes and "mask_ratio" in config:
        inputs["noise"] = noise(2, (config["image_size"] // config["patch_size"]) ** 2)
    if config.get("is_encoder_decoder") and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = ids()
    if "bbox" in takes:
        corner = torch.randint(0, 30, (2, TOKENS, 2), generator=generator)
        inputs["bbox"] = torch.cat([corner, corner + 20], -1)
    return inputs


def several_kinds(model: nn.Module | type[nn.Module], config: Config) -> bool:
    """Return whether a model reads images or sound beside text, with features in place of tokens."""
    takes = inspect.signature(model.forward).parameters
    return any(reads(names, config, takes) for names in (IMAGE_TOKENS, AUDIO_TOKENS))


def image_size(config: Config) -> tuple[int, ...]:
    config = config if config.get("image_size") else config.get("vision_config") or config
    size = config.get("image_size") or config.get("img_size") or config.get("crop_size") or 64
    sides = list(size) if isinstance(size, list | tuple) else [size, size]
    frames = [config["num_frames"]] if config.get("num_frames") else []
    return (2, *frames, count_channels(config), *sides[-2:])


def patches(config: Config, noise: Any) -> dict[str, Tensor]:
    """Return two images cut into flat patches, with their numbers of rows and columns (SigLIP 2)."""
    part = config.get("vision_config") or config
    side = int((part.get("num_patches") or 16) ** 0.5)
    pixels = noise(2, side * side, count_channels(part) * part["patch_size"] ** 2)
    shapes = torch.tensor([[side, side]] * 2)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(2, side * side).long(), "spatial_shapes": shapes}


def features(config: Config, noise: Any) -> Tensor:
    bins = (
        config.get("num_mel_bins")
        or config.get("feature_projection_input_dim")
        or config.get("input_feat_per_channel")
        or 16
    )
    if "spec_size" in config:  # spectrograms as images: one, or one and three crops of it
        return noise(2, 4 if config.get("enable_fusion") else 1, 2 * bins, bins)
    if config.get("model_type") in ("whisper", "qwen2_audio_encoder"):
        return noise(2, bins, 2 * config.get("max_source_positions", 32))
    return noise(2, 40, bins)


# -- images and sound beside text ----------------------------------------------------------------------


def key_of(names: tuple[str, ...], config: Config) -> str | None:
    return next((name for name in names if isinstance(config.get(name), int)), None)


def count_channels(part: Config) -> int:
    """Return the channels of the images that a part of a config describes."""
    return next((part[key] for key in ("num_channels", "in_channels", "in_chans") if part.get(key)), 3)


def reads(names: tuple[str, ...], config: Config, takes: Collection[str]) -> bool:
    """Return whether text and features of a kind are joint inputs, which `names` places among the tokens."""
    section, given = ("vision_config", "pixel_values") if names is IMAGE_TOKENS else ("audio_config", "input_features")
    placed = key_of(names, config) or (names is IMAGE_TOKENS and "cross_attention_mask" in takes)
    return bool(placed and isinstance(config.get(section), dict) and {given, "input_ids"} <= {*takes})


def join_features(
    model: nn.Module, config: Config, takes: Collection[str], ids: Tensor, noise: Noise
) -> dict[str, Tensor]:
    """Return `ids` with placeholders for features, and the inputs that the features are made of.

    Returns the ids alone if none of the known inputs fits the model.
    """
    pairs = (IMAGE_TOKENS, pictures, "get_image_features"), (AUDIO_TOKENS, sounds, "get_audio_features")
    for names, kinds, method in pairs:
        for given in kinds(config, takes, noise) if reads(names, config, takes) else ():
            count = count_features(model, method, given)
            if count is not None:
                return given | place_features(config, takes, ids, key_of(names, config), count)
    return {"input_ids": ids}


def place_features(
    config: Config, takes: Collection[str], ids: Tensor, key: str | None, count: int
) -> dict[str, Tensor]:
    """Return text, `count` placeholders, and text again, with the masks that distinguish them."""
    if key is None:  # features are read by cross-attention from all of the text
        mask = torch.ones(SAMPLES, ids.shape[1], 1, config["vision_config"]["max_num_tiles"], dtype=torch.int64)
        return {"input_ids": ids, "cross_attention_mask": mask}
    tokens = torch.cat([ids[:, :3], torch.full((SAMPLES, count), config[key]), ids[:, 3:]], 1)
    here = (tokens == config[key]).long()
    kinds = {"mm_token_type_ids": here, "token_type_ids": here if str(config["model_type"])[:6] == "gemma3" else None}
    return {"input_ids": tokens} | {k: v for k, v in kinds.items() if k in takes and v is not None}


def apart(ids: Tensor, config: Config) -> Tensor:
    """Return ids without those that the config gives a special meaning."""
    special = {v for k, v in config.items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    for _ in special:
        ids = torch.where(torch.isin(ids, torch.tensor(sorted(special))), ids + 1, ids)
    return ids


@torch.no_grad()
def count_features(model: nn.Module, method: str, given: Mapping[str, Tensor]) -> int | None:
    """Return the number of features of one sample; None if the model does not accept the input."""
    make = getattr(model, method, None)
    if "aspect_ratio_ids" in given:  # read by cross-attention, so they replace no tokens
        return 0
    if make is None:
        tower = getattr(getattr(model, "model", model), "audio_tower", None)
        lengths = getattr(tower, "_get_feat_extract_output_lengths", None)
        if lengths is None or "feature_attention_mask" not in given:
            return None
        return int(lengths(given["feature_attention_mask"].sum(-1))[1][0])
    try:
        names = inspect.signature(make).parameters
        any_name = any(p.kind is p.VAR_KEYWORD for p in names.values())
        output = make(**{k: v for k, v in given.items() if k in names or any_name})
    except Exception:  # another form of image
        return None
    output = getattr(output, "pooler_output", output)
    parts = [output] if isinstance(output, Tensor) else [part for part in output if isinstance(part, Tensor)]
    return sum(part.numel() // part.shape[-1] for part in parts) // SAMPLES or None


def pictures(config: Config, takes: Collection[str], noise: Noise) -> Iterator[dict[str, Tensor]]:
    """Yield images in the forms that models accept, the rarest first."""
    vision = config["vision_config"]
    channels = count_channels(vision)
    patch, side = vision.get("patch_size"), vision.get("image_size") or vision.get("img_size")
    if "image_grid_thw" in takes and isinstance(patch, int):
        yield dict(zip(("pixel_values", "image_grid_thw"), grid(vision, noise), strict=True))
    sides = list(side) if isinstance(side, list | tuple) else [side, side]
    if not all(isinstance(n, int) for n in sides):
        return
    if "aspect_ratio_ids" in takes:
        tiles = vision["max_num_tiles"]
        ratios = vision.get("supported_aspect_ratios") or [[1, tiles]]
        number = max(range(len(ratios)), key=lambda i: ratios[i][0] * ratios[i][1])
        mask = torch.zeros(SAMPLES, 1, tiles, dtype=torch.int64)
        mask[:, :, : ratios[number][0] * ratios[number][1]] = 1
        yield {
            "pixel_values": noise(SAMPLES, 1, tiles, channels, *sides),
            "aspect_ratio_ids": torch.full((SAMPLES, 1), number + 1),
            "aspect_ratio_mask": mask,
        }
    yield {"pixel_values": noise(SAMPLES, channels, *sides)}
    yield {"pixel_values": noise(SAMPLES, 1, channels, *sides)}


def grid(vision: Config, noise: Noise) -> tuple[Tensor, Tensor]:
    """Return images of free size as concatenated rows of patches, and the frames, rows and columns of each."""
    edge = EDGE * (vision.get("spatial_merge_size") or vision.get("merge_size") or 1)
    row = count_channels(vision) * (vision.get("temporal_patch_size") or 1) * vision["patch_size"] ** 2
    return noise(SAMPLES * edge**2, row), torch.tensor([[1, edge, edge]] * SAMPLES)


def sounds(config: Config, takes: Collection[str], noise: Noise) -> Iterator[dict[str, Tensor]]:
    """Yield log-mel features of a whole window."""
    audio = config["audio_config"]
    bins, positions = audio.get("num_mel_bins"), audio.get("max_source_positions")
    if not (isinstance(bins, int) and isinstance(positions, int)):
        return
    given = {"input_features": noise(SAMPLES, bins, 2 * positions)}
    for name in ("feature_attention_mask", "input_features_mask"):
        if name in takes:
            given[name] = torch.ones(SAMPLES, 2 * positions, dtype=torch.int64)
    yield given
