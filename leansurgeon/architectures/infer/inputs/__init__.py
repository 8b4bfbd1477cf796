"""Small inputs of every kind that the library's models accept."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.architectures.infer.inputs import several

TOKENS = 15
VOCAB = 200  # size of a small model's vocabulary, larger than its other sizes, as in real models


def example(
    model: nn.Module | type[nn.Module], config: Mapping[str, Any], seed: int = 0, vocab: int = VOCAB
) -> dict[str, Tensor]:
    """Return inputs that a model (or its class) runs on, according to its main input and forward signature.

    `config` gives the image size and the tokens that stand for images; the number of features of such an image is taken
    from the model itself, which may be smaller than the config's.
    """
    generator = torch.Generator().manual_seed(seed)
    takes = dict(inspect.signature(model.forward).parameters)
    takes.pop("self", None)
    main = getattr(model, "main_input_name", "input_ids")
    main = main if main in takes else next(iter(takes))
    inputs: dict[str, Tensor] = {}

    def ids() -> Tensor:
        return several.apart(torch.randint(10, vocab - 10, (2, TOKENS), generator=generator), config)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if "spatial_shapes" in takes and "pixel_attention_mask" in takes:
        inputs |= patches(config, noise)
    elif "grid_thw" in takes:
        pixels, grid = several.grid(config, noise)
        inputs = {next(iter(takes)): pixels, "grid_thw": grid}
        if "merge_sizes" in takes:
            inputs["merge_sizes"] = torch.ones(len(grid), dtype=torch.int64)
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
        inputs = several.join_features(model, config, takes, ids(), noise)
    if "noise" in takes and "mask_ratio" in config:
        inputs["noise"] = noise(2, (config["image_size"] // config["patch_size"]) ** 2)
    if config.get("is_encoder_decoder") and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = ids()
    if "bbox" in takes:
        corner = torch.randint(0, 30, (2, TOKENS, 2), generator=generator)
        inputs["bbox"] = torch.cat([corner, corner + 20], -1)
    return inputs


def several_kinds(model: nn.Module | type[nn.Module], config: Mapping[str, Any]) -> bool:
    """Return whether a model reads images or sound beside text, with features in place of tokens."""
    takes = inspect.signature(model.forward).parameters
    return any(several.reads(names, config, takes) for names in (several.IMAGE_TOKENS, several.AUDIO_TOKENS))


def image_size(config: Mapping[str, Any]) -> tuple[int, ...]:
    config = config if config.get("image_size") else config.get("vision_config") or config
    size = config.get("image_size") or config.get("img_size") or config.get("crop_size") or 64
    sides = list(size) if isinstance(size, list | tuple) else [size, size]
    frames = [config["num_frames"]] if config.get("num_frames") else []
    return (2, *frames, several.count_channels(config), *sides[-2:])


def patches(config: Mapping[str, Any], noise: Any) -> dict[str, Tensor]:
    """Return two images cut into flat patches, with their numbers of rows and columns (SigLIP 2)."""
    part = config.get("vision_config") or config
    side = int((part.get("num_patches") or 16) ** 0.5)
    pixels = noise(2, side * side, several.count_channels(part) * part["patch_size"] ** 2)
    shapes = torch.tensor([[side, side]] * 2)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(2, side * side).long(), "spatial_shapes": shapes}


def features(config: Mapping[str, Any], noise: Any) -> Tensor:
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
