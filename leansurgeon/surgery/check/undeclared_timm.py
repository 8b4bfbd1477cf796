"""One model of timm put through the product: a small random one of that name is saved by timm, cut, loaded again
by `timm.create_model`, and compared with a cut made by hand in memory.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf

from leansurgeon import architectures
from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.infer.differences import levels
from leansurgeon.architectures.infer.library import Unbuildable, quietly, reason
from leansurgeon.architectures.infer.timm_models import arguments
from leansurgeon.architectures.infer.timm_models.library import TimmLibrary, args_of
from leansurgeon.architectures.infer.timm_models.search import first_small
from leansurgeon.architectures.limits import refusals
from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.model import entry_module
from leansurgeon.checkpoints.source import open_source
from leansurgeon.surgery.check.undeclared import USUAL, Drawn, FamilyCheck, compared, in_scratch

PREFIX = "timm/"
# One or more of every family of timm whose blocks hold attention, the small ones where there is a choice.
OF_EVERY_FAMILY = """
vit_small_patch16_224 vit_base_patch16_reg4_gap_256 vit_medium_patch16_gap_240 vit_wee_patch16_reg1_gap_256
vit_base_patch16_clip_224 vit_base_patch32_clip_quickgelu_224 vit_base_patch16_siglip_224
vit_base_patch16_siglip_gap_224 vit_so150m_patch16_reg4_map_256 vit_so400m_patch14_siglip_224
vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 vit_small_patch16_dinov3 vit_small_plus_patch16_dinov3
vit_base_patch16_18x2_224 vit_small_patch16_36x1_224 vit_small_patch16_18x2_224 vit_base_patch16_xp_224
vit_base_patch16_rpn_224 vit_base_mci_224 vit_small_patch16_rope_224 vit_small_patch16_rope_mixed_224
vit_small_patch16_rope_ape_224 vit_relpos_small_patch16_224 vit_relpos_base_patch32_plus_rpn_256
vit_srelpos_small_patch16_224 vit_tiny_r_s16_p8_224 vit_base_patch16_plus_240 vit_dlittle_patch16_reg1_gap_256
vit_pe_core_tiny_patch16_384 vit_pe_spatial_tiny_patch16_512 vit_pe_lang_large_patch14_448
vit_intern300m_patch14_448 vit_dpwee_patch16_reg1_gap_256 vit_giantopt_patch16_siglip_256
deit3_small_patch16_224 deit3_medium_patch16_224 deit_tiny_patch16_224 deit_tiny_distilled_patch16_224
flexivit_small samvit_base_patch16 aimv2_large_patch14_224 naflexvit_base_patch16_gap
beit_base_patch16_224 beitv2_base_patch16_224 beit3_base_patch16_224
eva02_tiny_patch14_224 eva02_base_patch16_clip_224 eva_large_patch14_196 eva_giant_patch14_clip_224
cait_xxs24_224 xcit_nano_12_p16_224 tnt_s_patch16_224 volo_d1_224 davit_tiny
swin_tiny_patch4_window7_224 swin_s3_tiny_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224
twins_pcpvt_small twins_svt_small pit_ti_224 pit_s_distilled_224 crossvit_tiny_240
crossvit_9_dagger_240 pvt_v2_b0 pvt_v2_b2_li hiera_tiny_224 hieradet_small mvitv2_tiny
levit_128s levit_conv_128s nest_tiny nest_tiny_jx convit_tiny visformer_tiny coat_lite_tiny
coat_tiny edgenext_xx_small efficientvit_m0 efficientvit_b0 efficientformer_l1
efficientformerv2_s0 gcvit_xxtiny tiny_vit_5m_224 caformer_s18 poolformer_s12 fastvit_sa12
nextvit_small coatnet_nano_rw_224 maxvit_nano_rw_256 mobilevit_xxs shvit_s1 vitamin_small_224
mixer_s16_224 gmixer_12_224 resmlp_12_224 gmlp_ti16_224 sequencer2d_s focalnet_tiny_srf
convnext_atto convnextv2_atto deepseek_vit_412m qwen3_vit_88m swiftformer_xs convmixer_768_32
"""
NAMES = tuple(OF_EVERY_FAMILY.split())


def checked(name: str, tower: None = None, drawn: Drawn = USUAL) -> FamilyCheck:
    """Put a name (`timm/NAME`) to the test. Whatever timm does ends in the row."""
    started, entry = time.monotonic(), name.removeprefix(PREFIX)
    with quietly():
        try:
            flat = {"model_type": entry} | arguments.flattened(arguments.numbers_of(entry, {}))
            small, library = first_small(TimmLibrary.of(flat), flat)
        except Exception as error:  # timm raises whatever it likes
            row = FamilyCheck(name, why=str(error) if isinstance(error, Unbuildable) else reason(error))
        else:
            row = in_scratch(name, library.cls.__name__, partial(through_the_product, name, library, small, drawn.seed))
    return replace(row, seconds=round(time.monotonic() - started, 1))


def through_the_product(name: str, library: TimmLibrary, small: Config, seed: int, scratch: Path) -> FamilyCheck:
    """Cut a small model of this name as a user would, and compare it with a cut by hand."""
    model = library.build(small, seed)
    save(model, scratch / "source", args_of(small))
    source = open_source(str(scratch / "source"))
    arch, expected = source.architecture, len(source.shape.stages)
    declared = architectures.declared(source.config) is not None
    row = FamilyCheck(name, library.cls.__name__, True, declared, refusals(arch), bool(arch.decoupled))
    stages, _ = levels(library, small)
    if len(stages) != expected:
        return replace(row, why=f"{len(stages)} lists of blocks are found, and its declaration has {expected}")
    return compared(row, source, {}, model, stages, partial(library.example, model, small, seed), loaded)


def save(model: torch.nn.Module, folder: Path, args: Config) -> None:
    """A folder as `timm.models.save_for_hf` writes it, also where modules share tensors, as published ones hold them:
    once under each name.
    """
    folder.mkdir()
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    save_config_for_hf(model, folder / "config.json", model_args=args)


def loaded(folder: Path, _: Architecture) -> torch.nn.Module:
    """The result as a user loads it; one of our entry points is registered first."""
    if (entry := read_config(folder)["architecture"]).startswith("leansurgeon_"):
        importlib.import_module(entry_module(entry))
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
