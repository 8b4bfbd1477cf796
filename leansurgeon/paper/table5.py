"""Table 5: large vision transformers on ImageNet-1k."""

from __future__ import annotations

from leansurgeon.paper.base import Exhibit, Row, Words
from leansurgeon.paper.table4 import imagenet

VOLO4_MLP = "1152,2304,2304,2304"
DAVIT_MLP = "768,1536,3072,6144"
BASELINE = (
    "24 layers with 16 heads and the printed MLP 4096 have {as_printed} parameters. The printed figure is that of MLP "
    "2048 ({ours}) or of 16 layers ({other[16 layers]}); the printed memory fits MLP 2048 better. Either way the "
    "baseline was not ViT-L."
)


def vit_like(model: str, preset: str, original: tuple[float, float], lean: tuple[float, float]) -> tuple[Row, Row]:
    """The original and the lean row of one image model."""
    return (
        Row(
            model,
            "original",
            preset,
            imagenet("24", "16", "4096", *original, "203.6 M", 200.0),
            "keep",
            reading=Words("24", "16", "2048"),
            others={"16 layers": Words("16", "16", "4096")},
            remark=BASELINE,
        ),
        Row(model, "lean", preset, imagenet("8", "30", "2048", *lean, "98.6 M", 115.2), "keep"),
    )


ROWS = (
    *vit_like("ViT-L", "vit-l", (80.6, 94.4), (81.1, 95.1)),
    *vit_like("DeiT-L", "deit-l", (81.5, 95.3), (81.8, 95.4)),
    Row("XCiT-L", "original", "xcit-l", imagenet("24", "16", "3072", 82.1, 95.9, "189.1 M", 275.2), "split"),
    Row(
        "XCiT-L",
        "lean",
        "xcit-l",
        imagenet("12", "24", "3072", 82.4, 95.9, "103.8 M", 160.8),
        "split",
        remark="The width is split here, while XCiT-M in Table 4 keeps its head_dim.",
    ),
    Row(
        "VOLO-d4",
        "original",
        "volo-d4",
        imagenet("8,8,16,4", "12,16,16,16", "1536,3072,3072,3072", 83.0, 96.1, "193.0 M", 294.4),
        "split",
        reading=Words("8,8,16,4", "12,16,16,16", VOLO4_MLP),
        remark="The printed MLP (1536, 3072, ...) would give {as_printed} parameters; the printed figure is that of "
        "(1152, 2304, ...).",
    ),
    Row(
        "VOLO-d4",
        "lean",
        "volo-d4",
        imagenet("4,4,8,2", "24,32,32,32", "768,1536,1536,1536", 83.1, 96.2, "105.6 M", 188.8),
        "split",
        reading=Words("4,4,8,2", "24,32,32,32", VOLO4_MLP),
        remark="The printed MLP (768, 1536, ...) would give {as_printed} parameters; the printed figure is that of "
        "(1152, 2304, ...): the MLP was not made narrower.",
    ),
    Row(
        "DaViT-L",
        "original",
        "davit-l",
        imagenet("1,1,9,1", "6,12,24,48", DAVIT_MLP, 83.6, 96.5, "196.8 M", 238.4),
        "split",
    ),
    Row(
        "DaViT-L",
        "lean",
        "davit-l",
        imagenet("1,1,5,1", "6,12,48,48", DAVIT_MLP, 83.6, 96.6, "140.0 M", 186.4),
        "split",
    ),
)
TABLE = Exhibit(
    "5",
    "large vision transformers on ImageNet-1k",
    ROWS,
    "top-1",
    (
        "ViT-L and DeiT-L keep the head_dim (30 heads do not divide a width of 1024); XCiT-L, VOLO-d4 and DaViT-L "
        "split the width.",
    ),
)
