"""What `leansurgeon families` tests, and the outcome for one type: values that need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EQUAL = 1e-4
PREFIX = "timm/"
# At least one model of every timm family whose blocks hold attention, the smaller ones if there is a choice.
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


@dataclass(frozen=True)
class RandomModel:
    """A random model of a type: seed of its weights and inputs, and its depth if that can be chosen. Both differ from
    those used to prove an inferred declaration.
    """

    seed: int = 23
    depth: int = 7


USUAL = RandomModel()


@dataclass(frozen=True)
class FamilyCheck:
    """Outcome for one type. `built` is False if no small model of it runs (`why` gives the reason); `refused` maps each
    of depth, heads and mlp_dim that may not change to its reason.
    """

    name: str
    cls: str = ""
    built: bool = False
    declared: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    decoupled: bool = False  # heads need our modeling file
    asked: Mapping[str, Any] = field(default_factory=dict)
    difference: float | None = None  # between our cut and one made by hand, relative to the outputs' spread
    why: str = ""
    defect: bool = False  # an error of ours, described in `why`
    seconds: float = 0.0
    seed: int = 23  # of the random weights
    depth: int = 7

    def can(self, what: str) -> bool:
        """Return whether a number may change, confirmed by a cut equal to one made by hand."""
        return self.right and what not in self.refused

    @property
    def right(self) -> bool:
        """Whether the cut model's outputs equal those of a cut by hand."""
        return self.difference is not None and self.difference <= EQUAL
