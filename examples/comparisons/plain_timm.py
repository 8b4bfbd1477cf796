"""Train a timm model on folders of classes with a plain loop of torch and timm.

    python examples/comparisons/plain_timm.py DATA -o OUT --epochs 5
    python examples/comparisons/plain_timm.py DATA --start START -o OUT --steps 300 --batch 64 --lr 1e-4 --seed 0

DATA has the folders train/CLASS and test/CLASS of 28 x 28 images. Without --start a ViT of 6 layers, 4 heads and width
128 is trained from nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.models import save_for_hf
from torch.nn import functional as F

SHAPE = {"img_size": 28, "patch_size": 4, "in_chans": 1, "embed_dim": 128, "depth": 6, "num_heads": 4}
MEAN, STD = 0.286, 0.353


def main() -> None:
    asked = arguments()
    torch.manual_seed(asked.seed)
    np.random.seed(asked.seed)
    (x, y, names), (tx, ty, _) = (read(asked.data / part) for part in ("train", "test"))
    model = (
        timm.create_model(f"local-dir:{asked.start}", pretrained=True) if asked.start else
        timm.create_model("vit_tiny_patch16_224", num_classes=len(names), **SHAPE)
    )  # fmt: skip
    steps = asked.steps or asked.epochs * (len(x) // asked.batch)
    adamw = torch.optim.AdamW(model.parameters(), lr=asked.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adamw, asked.lr, total_steps=steps, pct_start=0.05)
    began, rows = time.process_time(), []
    for step in range(steps):
        rows = rows if len(rows) >= asked.batch else torch.randperm(len(x)).tolist()
        some, rows = rows[: asked.batch], rows[asked.batch :]
        loss = F.cross_entropy(model.train()(augment(x[some])), y[some])
        loss.backward()
        adamw.step()
        schedule.step()
        adamw.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
    spent = time.process_time() - began
    with torch.no_grad():
        said = torch.cat([model.eval()(part).argmax(-1) for part in tx.split(500)])
    accuracy = (said == ty).float().mean().item()
    print(json.dumps({"accuracy": accuracy, "steps": steps, "seed": asked.seed, "processor_seconds": round(spent, 1)}))
    model.pretrained_cfg |= {"input_size": (1, 28, 28), "mean": (MEAN,), "std": (STD,), "num_classes": len(names)}
    made = {"num_classes": len(names), "model_args": SHAPE | {"num_classes": len(names)}, "label_names": names}
    save_for_hf(model, str(asked.out), model_config=made, safe_serialization=True)


def read(folder: Path) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Images (N, 1, 28, 28), classes (N,) and their names."""
    names = sorted(path.name for path in folder.iterdir())
    files = [(file, number) for number, name in enumerate(names) for file in sorted((folder / name).glob("*.png"))]
    images = np.stack([np.asarray(Image.open(file).convert("L"), dtype=np.float32) for file, _ in files])
    return torch.tensor((images / 255 - MEAN) / STD)[:, None], torch.tensor([number for _, number in files]), names


def augment(x: torch.Tensor) -> torch.Tensor:
    """The whole batch shifted by up to two pixels, around the edges."""
    dx, dy = np.random.randint(-2, 3, 2)
    return torch.roll(x, (int(dx), int(dy)), (2, 3))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
