"""What needs a real GPU to be believed: kernels, their precision, memory that runs out. Everything here is small.

pytest -o addopts= -m gpu -s tests          # this, and what is measured under tests/benchmarks
"""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from leansurgeon.cli.main import app
from leansurgeon.errors import OutOfMemory
from leansurgeon.measure.heads import importance, judge, sites
from leansurgeon.measure.kappa.blocks import measure_blocks
from leansurgeon.measure.kappa.spectrum import conditioning
from leansurgeon.training import loop as loop
from tests.conftest import architecture, build, example
from tests.support.training_standin import Words, recipe, word_model

pytestmark = pytest.mark.gpu
BACKENDS = {"auto", "math", "flash", "efficient", "cudnn", "eager"}


@pytest.fixture(autouse=True)
def device():
    assert torch.cuda.is_available(), "these tests need a CUDA device"
    yield torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()


SHAPES = {"wide": (197, 768), "tall": (197, 64), "square": (96, 96), "one-token": (1, 8)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_the_spectrum_of_a_block_is_that_of_the_cpu(shape, masked, device):
    """The same fp32 block, well and badly conditioned and without full rank: 1e-6 where kappa is below 1e5."""
    torch.manual_seed(0)
    block = torch.randn(6, *shape)
    block[1] *= torch.logspace(0, -3, shape[1])  # kappa about 1e3
    block[2] *= torch.logspace(0, -6, shape[1])  # beyond the Gram matrix: svdvals
    block[3, :, 0] = block[3, :, -1]  # one column twice
    block[4] += 100  # a large mean token
    mask = torch.ones(6, shape[0], dtype=torch.bool)
    mask[1:, shape[0] * 2 // 3 + 1 :] = not masked
    for centred in (False, True):
        here = conditioning(block, mask if masked else None, centred=centred)
        there = conditioning(block.to(device), mask.to(device) if masked else None, centred=centred)
        for one, other in zip(here, there, strict=True):
            assert (one.rank, one.k, one.tokens) == (other.rank, other.k, other.tokens)
            close = 1e-6 if one.bound < 1e5 else 1e-4
            for name in ("kappa", "bound", "stable_rank", "effective_rank"):
                assert getattr(other, name) == pytest.approx(getattr(one, name), rel=close)
            close = 1e-6 if one.centred_bound < 1e5 else 1e-4
            assert other.centred_bound == pytest.approx(one.centred_bound, rel=close, nan_ok=True)


def vision():
    """A small ViT with convolutional patches, and pixels that TF32 would round."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4).eval()
    return model, [f"blocks.{i}.attn.proj" for i in range(4)], {"pixel_values": torch.randn(8, 3, 64, 64)}


def test_kappa_of_a_model_is_that_of_the_cpu(device):
    """Measured on a CPU: an fp32 forward is within 5e-7 of an fp64 one here, and pixels and patch embedding rounded to
    TF32 move the median kappa by 1e-4.
    """
    model, projections, batch = vision()
    loaded = SimpleNamespace(model=model, projections=projections, forward=lambda b: model(b["pixel_values"]))
    found = []
    for place in ("cpu", device):
        model.to(place)
        found.append(measure_blocks(loaded, [batch], lambda _: None, 8))
    for one, other in zip(*(f["layers"] for f in found), strict=True):
        print(f"layer {one['layer']}: median kappa {one['median']:.8g} on the CPU, {other['median']:.8g} on the GPU")
        assert other["median"] == pytest.approx(one["median"], rel=1e-5)
        assert other["stable_rank"] == pytest.approx(one["stable_rank"], rel=1e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit", "llama"])
def test_importance_of_heads_is_that_of_the_cpu(family, device):
    model, found = build(family), []
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    from leansurgeon.checkpoints.model import Loaded

    for place in ("cpu", device):
        loaded = Loaded(model.to(place), architecture(family), config, None, None)
        places = sites.sites(loaded)
        watched = judge.OutputScorer(loaded)
        values = importance.importance(watched, places, [example(model)])
        keep = np.arange(len(values)) % 3 > 0
        found.append((values, judge.HeadScorer(watched, places, [example(model)]).scores(keep).losses))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_bench_has_a_row_for_every_backend(precision, device):
    """head_dim 64 and no mask: every kernel is there in half precision; flash and cuDNN have none for fp32."""
    asked = ["bench", "vit-b", "--batch", "16", "--rounds", "3", "--sweep-heads", "24", "--precision", precision]
    found = CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False)
    document = json.loads(found.stdout)
    peaks = {row["backend"]: row["peak_memory"] for row in document["rows"][1:] if row["backend"] != "auto"}
    print(f"\n{document['device']}, torch {document['torch']}, {precision}")
    for row in document["rows"]:
        step = row["seconds"]["step"]
        print(
            f"{row['name']:28} {row['backend']:10} step {1000 * step['median']:7.2f} ms "
            f"({1000 * step['low']:.2f} to {1000 * step['high']:.2f}), {row['training_per_second']:7.0f} images/s, "
            f"peak {row['peak_memory'] / 2**20:7.0f} MiB"
        )
    print(*document["skipped"], sep="\n")
    backends = {row["backend"] for row in document["rows"]}
    missing = {"flash", "cudnn"} if precision == "fp32" else set()
    assert backends == BACKENDS - missing
    assert {text.split(":")[0] for text in document["skipped"]} == missing
    weights = 4 * document["rows"][0]["parameters"]
    assert all(row["peak_memory"] > 3 * weights for row in document["rows"])  # with two moments
    assert peaks["eager"] > peaks["efficient"] and document["peak_memory_kind"] == "cuda allocator peak"


TRAININGS = {
    "fp32": {},
    "bf16": {"precision": "bf16", "ema": {"decay": 0.9}},
    "fp16": {"precision": "fp16", "micro_batch": 4},
    "lamb": {"optim": {"name": "lamb", "lr": 1e-2}},
    "sgd": {"optim": {"name": "sgd", "lr": 1e-2}, "nan": "skip"},
    "compiled": {"compile": True},
}


@pytest.mark.parametrize("settings", TRAININGS.values(), ids=TRAININGS)
def test_a_training_is_that_of_the_cpu(settings, tmp_path, device):
    told = {}
    for cpu in (True, False):
        wanted = recipe(**(settings if not cpu else {k: v for k, v in settings.items() if k != "compile"}))
        folder = tmp_path / str(cpu)
        told[cpu] = loop.train(
            wanted, tmp_path, folder, loaded=word_model(), task=Words(), say=print, cpu=cpu
        ).as_dict()
    assert told[False]["device"] == torch.cuda.get_device_name(device)
    assert told[False]["memory"]["kind"] == "cuda allocator peak" and told[False]["memory"]["bytes"] > 0
    close = 1e-3 if settings.get("precision", "fp32") == "fp32" else 5e-2
    assert told[False]["final"]["loss"] == pytest.approx(told[True]["final"]["loss"], rel=close)


def test_a_training_goes_on_from_its_checkpoint(tmp_path, device):
    """Dropout on the GPU is a function of seed and step: the same losses, interrupted or not."""

    class Interrupted(Words):
        seen = 0

        def batch(self, split, indices, *, seed, epoch):
            self.seen += split == "train"
            if self.seen == 7:
                raise KeyboardInterrupt
            return super().batch(split, indices, seed=seed, epoch=epoch)

    def run(folder, task, **how):
        settings = recipe(checkpoint={"every": "2st"})
        options = {"loaded": word_model(dropout=0.2), "task": task, "say": print}
        return loop.train(settings, tmp_path, folder, **options, **how).as_dict()

    whole = run(tmp_path / "whole", Words())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", Interrupted())
    told = run(tmp_path / "cut", Words(), resume="auto")
    assert told["resumed_after"] and told["final"]["loss"] == pytest.approx(whole["final"]["loss"], rel=1e-5)


class Greedy(torch.nn.Module):
    """Takes so much of the device's memory for every sample of a training batch, and gives it back."""

    def __init__(self, inside: torch.nn.Module, share: float) -> None:
        super().__init__()
        self.inside, self.share = inside, share

    def forward(self, ids):
        if torch.is_grad_enabled() and ids.is_cuda:
            whole = torch.cuda.get_device_properties(ids.device).total_memory
            torch.empty(int(len(ids) * self.share * whole), dtype=torch.uint8, device=ids.device)
        return self.inside(ids)


def test_a_micro_batch_is_halved_until_it_fits(tmp_path, device):
    model, said = word_model(), []
    model.model = Greedy(model.model, 0.1)
    told = loop.train(recipe(), tmp_path, tmp_path / "run", loaded=model, task=Words(), say=said.append).as_dict()
    assert told["micro_batch"] == 8 and sum("does not fit" in line for line in said) == 1
    assert told["memory"]["bytes"] > 0.7 * torch.cuda.get_device_properties(device).total_memory


def test_what_never_fits_is_refused(tmp_path, device):
    model = word_model()
    model.model = Greedy(model.model, 2.0)
    with pytest.raises(OutOfMemory, match="micro batch of 1"):
        loop.train(recipe(), tmp_path, tmp_path / "run", loaded=model, task=Words(), say=print)
    assert not (tmp_path / "run").exists()
