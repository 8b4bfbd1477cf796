"""What a recipe may ask of the engine, each against something that we did not write: torch, timm, a closed form."""

from __future__ import annotations

import copy
import importlib
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from leansurgeon.errors import UsageError
from leansurgeon.measure.costs.memory import checkpoint_activations
from leansurgeon.training import data_loader, distributed, flops, optimizer, regularize, schedule, setup
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.recipe.durations import parse_duration
from leansurgeon.training.recipe.schema import Optim, Train
from tests.support import training_interrupted as cut
from tests.support.training_standin import Dots, Words, dot_model, losses, trained, word_model


def _train(**changes) -> Train:
    return Train.model_validate({"duration": "3ep", "batch": 64, "optim": {"lr": 1e-3}} | changes)


@pytest.mark.parametrize("name", ["one-cycle", "triangle", "constant"])
def test_a_lowest_rate_that_a_schedule_does_not_read_is_refused(name):
    with pytest.raises(ValueError, match=f"min_lr.*{name}"):
        _train(schedule={"name": name, "warmup": 0.1, "min_lr": 1e-5})
    made = schedule.make_plan(_train(duration="10st", schedule={"name": "cosine", "min_lr": 1e-5}), 64, 1)
    assert made.lr(10) == pytest.approx(1e-5)


def test_the_budget_triangle_is_the_published_formula():
    """Crammed BERT's budget-triangle2: min(0.25 + x (1 - 0.25)/(1 - 0.25), 1/0.25 - x/0.25) of the rate at x of 1."""
    made = schedule.make_plan(_train(duration="1000st", schedule={"name": "triangle"}), 64, 1)
    for step in range(1001):
        x = step / 1000
        wanted = 1e-3 * min(0.25 + x * 0.75 / 0.75, (1 - x) / 0.25)
        assert made.lr(step) == pytest.approx(wanted, abs=1e-15)


def test_a_timed_training_follows_the_clock_between_looks(tmp_path):
    made = schedule.make_plan(_train(duration="24h", schedule={"name": "triangle"}), 640, 1)
    clock = schedule.Pace(made)
    clock.look(100, 6 * 3600.0)  # 216 s a step
    assert made.lr(clock.place(100)) == pytest.approx(1e-3 * 0.5)
    assert clock.fraction(110) == pytest.approx(0.275) and not clock.over(110)
    clock.look(200, 24 * 3600.0)
    assert clock.over(200)
    other = schedule.Pace(made)
    other.restore(clock.state())
    assert other.place(201) == clock.place(201)
    summary, rows = trained(
        tmp_path, duration="1s", schedule={"name": "triangle"}, eval={"every": "100ep", "batch": 13}
    )
    assert summary["steps"] > 5 and 0.9 < summary["seconds"] < 10
    rates = [row["lr"] for row in rows if row["type"] == "train"]
    assert rates[-1] < 0.5 * max(rates)  # it fell at the end
    assert rows[-1]["type"] == "eval" and rows[-1]["step"] == summary["steps"]


def test_a_timed_training_knows_its_pace_long_before_the_first_line(tmp_path, monkeypatch):
    """With slow steps and few lines, the first line would come after the warm-up, and all before it trained at zero."""
    rates, real = [], Trainer.step

    def step(self, at, batches):
        rates.append(self.lr(at))
        time.sleep(0.03)
        return real(self, at, batches)

    monkeypatch.setattr(Trainer, "step", step)
    settings = {"schedule": {"name": "triangle", "base": 0.0}, "log_every": 1000}
    summary, _ = trained(tmp_path, duration="2s", eval={"every": "100ep", "batch": 13}, **settings)
    assert len(rates) == summary["steps"] > 5
    assert max(rates) > 0.5 * 1e-2 and rates[-1] < 0.5 * max(rates)
    assert sum(rate > 0 for rate in rates) >= len(rates) - 2


@pytest.mark.parametrize("text", ["24h", "30m", "90s"])
def test_times_are_no_steps(text):
    assert parse_duration(text).seconds == {"24h": 86400, "30m": 1800, "90s": 90}[text]
    with pytest.raises(ValueError, match="is a time"):
        parse_duration(text).steps(10)


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("ramp", [None, {"start": 16, "until": 0.5}, {"start": 8, "until": "1ep"}])
def test_every_epoch_shows_every_sample_once_whatever_the_ramp(ramp, processes):
    made = schedule.make_plan(_train(batch=32, batch_ramp=ramp, micro_batch=2), 100, processes)

    def order(epoch):
        return data_loader.epoch_order(7, epoch, 100)

    seen = []
    batches = []
    for step in range(made.steps):
        rows = []
        for epoch, indices in data_loader.list_groups(order, made.position(step), made.batch_at(step), 100, made.group):
            hands = [data_loader.split_micro_batches(indices, processes, rank, made.micro) for rank in range(processes)]
            assert sorted(np.concatenate([hand.ravel() for hand in hands])) == sorted(indices)
            rows += [(epoch, index) for index in indices]
        assert len(rows) == made.batch_at(step)
        batches.append(len(rows))
        seen += rows
    assert len(set(seen)) == len(seen)  # no sample twice in an epoch
    assert made.epochs >= 3 and len(seen) == made.position(made.steps)
    assert batches == sorted(batches) and batches[-1] == 32
    assert batches[0] == (ramp["start"] if ramp else 32)
    if ramp:
        assert made.epochs < 3 + 32 / made.epoch_samples
    first, second = ([index for epoch, index in seen if epoch == number][:8] for number in (0, 1))
    other = data_loader.epoch_order(8, 0, 100)[:8]
    assert first != second and first != list(other)  # epochs and seeds have orders of their own


def test_a_ramp_trains_and_evaluates_at_epoch_ends(tmp_path):
    ramp = {"start": 4, "until": "2ep"}
    summary, rows = trained(tmp_path, duration="4ep", batch_ramp=ramp, eval={"every": "1ep", "batch": 13})
    evaluated = [row["step"] for row in rows if row["type"] == "eval"]
    assert len(evaluated) == 5 and evaluated[-1] == summary["steps"]
    assert np.diff(evaluated)[0] > np.diff(evaluated)[-1]  # small batches: more steps an epoch


def _picture_batch(size):
    images = torch.arange(size * 48, dtype=torch.float32).reshape(size, 3, 4, 4)
    return {"pixel_values": images, "labels": torch.arange(size) % 3}


def test_mixing_is_timms_and_the_same_however_the_batch_is_cut():
    from timm.data import Mixup

    made = regularize.BatchMixing(_train(mixup=0.8, cutmix=1.0, seed=5), cut.Pictures())
    kinds = set()
    for step in range(12):
        whole = _picture_batch(8)
        mixed = made(whole, 0, step)
        places = regularize.pairing_order(8, torch.device("cpu"))
        np.random.seed(data_loader.mixing_seed(5, 0, step))
        options = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.0, "num_classes": 3}
        images, labels = Mixup(**options)(whole["pixel_values"][places].clone(), whole["labels"][places])
        assert torch.equal(mixed["pixel_values"], images) and torch.equal(mixed["labels"], labels)
        kinds.add(bool((images == whole["pixel_values"][places]).any()))
        halves = [made({k: v[at : at + 4] for k, v in whole.items()}, 0, step) for at in (0, 4)]
        together = torch.cat([half["pixel_values"] for half in halves])
        # The same mixed images, in another order.
        key = lambda tensor: sorted(map(tuple, tensor.reshape(8, -1).tolist()))  # noqa: E731
        assert key(together) == key(mixed["pixel_values"])
    assert kinds == {True, False}  # cutmix and mixup both came
    before = np.random.get_state()[1].copy()
    made(_picture_batch(4), 0, 0)
    assert (np.random.get_state()[1] == before).all()


def test_mixing_needs_pictures_in_even_batches():
    with pytest.raises(UsageError, match=r"\bmixup\b.*'words'.*\bmasked-lm\b"):
        regularize.BatchMixing(_train(mixup=0.8), Words())
    with pytest.raises(UsageError, match="no even number"):
        schedule.make_plan(_train(mixup=0.8, batch=15), 64, 1)


@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("xcit.Xcit", {"depth": 3, "embed_dim": 16, "num_heads": 2}),
        (
            "volo.VOLO",
            {
                "layers": (2, 1, 2, 1),
                "embed_dims": (16, 32, 32, 32),
                "num_heads": (2, 2, 2, 2),
                "mlp_ratio": 2,
                "qkv_bias": False,
                "downsamples": (True, False, False, False),
                "outlook_attention": (True, False, False, False),
                "post_layers": ("ca", "ca"),
            },
        ),
        ("davit.DaVit", {"depths": (1, 1, 3, 1), "embed_dims": (8, 16, 32, 64), "num_heads": (1, 2, 2, 2)}),
        ("cait.Cait", {"depth": 3, "embed_dim": 16, "num_heads": 2}),
        ("vision_transformer.VisionTransformer", {"depth": 4, "embed_dim": 12, "num_heads": 2}),
    ],
)
def test_drop_path_is_timms_in_every_module(name, small):
    from timm.layers import DropPath

    module, cls = name.split(".")
    make = getattr(importlib.import_module(f"timm.models.{module}"), cls)
    theirs, ours = (make(**small, drop_path_rate=rate) for rate in (0.3, 0.0))
    regularize.set_drop_path(ours, 0.3, type(ours).__name__)
    rates = [
        {path: part.drop_prob for path, part in model.named_modules() if isinstance(part, DropPath) and part.drop_prob}
        for model in (theirs, ours)
    ]
    assert rates[0] and rates[1] == pytest.approx(rates[0])


def test_drop_path_of_a_model_with_heads_of_its_own_is_timms_too():
    """A class of ours is made of timm's: XCiT gives every block the whole rate."""
    import leansurgeon.models.timm_xcit as lean_xcit

    small = {"depth": 3, "embed_dim": 16, "num_heads": 3, "head_dim": 7, "cls_num_heads": 2}
    ours = lean_xcit.LeanXcit(**small)
    regularize.set_drop_path(ours, 0.3, "LeanXcit")
    assert [block.drop_path1.drop_prob for block in ours.blocks] == [0.3] * 3
    assert not any(getattr(part, "drop_prob", 0) for part in ours.cls_attn_blocks.modules())
    with pytest.raises(UsageError, match="no place for drop_path"):
        regularize.set_drop_path(word_model().model, 0.1, "WordModel")


def test_the_average_is_evaluated_and_exported(tmp_path):
    loaded = word_model()
    start = copy.deepcopy(loaded.model)
    states = []

    class Watched(Words):
        def batch(self, split, indices, **rest):
            states.append((split, copy.deepcopy(loaded.model.state_dict())))
            return super().batch(split, indices, **rest)

    summary, _ = trained(
        tmp_path, loaded=loaded, task=Watched(), ema={"decay": 0.7}, eval={"every": "8st", "batch": 13}
    )
    weights = [*[state for split, state in states if split == "train"][1:], states[-1][1]]
    average = {name: value.clone() for name, value in weights[0].items()}  # timm: the first update copies
    for state in weights[1:]:
        average = {name: 0.7 * value + 0.3 * state[name] for name, value in average.items()}
    for name in ("model", "last"):
        saved = torch.load(tmp_path / "run" / name / "weights.pt", weights_only=True)
        for key, value in average.items():
            assert torch.allclose(saved[key], value, atol=1e-6), key
    assert not torch.allclose(average["head.weight"], loaded.model.state_dict()["head.weight"])
    start.load_state_dict(average)
    batch = Words().batch("eval", np.arange(13), seed=0, epoch=0)
    loss = F.cross_entropy(start(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    assert summary["final"]["loss"] == pytest.approx(loss.item(), abs=1e-5) and summary["averaged"]


@pytest.mark.parametrize(("name", "theirs"), [("adam", "Adam"), ("sgd", "SGD"), ("lamb", "Lamb")])
def test_optimizers_are_those_of_torch_and_timm(name, theirs):
    import timm.optim

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    other = copy.deepcopy(model)
    ours = optimizer.make_optimizer(model, Optim(name=name, lr=1e-2, weight_decay=0.1), fused=False)
    groups = [{"params": [other.weight], "weight_decay": 0.1}, {"params": [other.bias], "weight_decay": 0.0}]
    kind = getattr(timm.optim if name == "lamb" else torch.optim, theirs)
    options = {"momentum": 0.9} if name == "sgd" else {"max_grad_norm": None} if name == "lamb" else {}
    reference = kind(groups, lr=1e-2, **options | ({"eps": 1e-8} if name == "lamb" else {}))
    for _ in range(3):
        for net, stepper in ((model, ours), (other, reference)):
            stepper.zero_grad()
            net(torch.ones(2, 4)).pow(2).sum().backward()
            stepper.step()
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)


def test_half_precision_with_scaled_losses_learns_what_fp32_does(tmp_path):
    _, full = trained(tmp_path / "fp32")
    _, half = trained(tmp_path / "fp16", precision="fp16")
    assert losses(half) == pytest.approx(losses(full), abs=1e-2)
    assert losses(half) != losses(full)
    # Clipped and told as they are, not as they were scaled: AdamW alone would not show the difference.
    norms = [(a["grad_norm"], b["grad_norm"]) for a, b in zip(full, half, strict=True) if b.get("grad_norm")]
    assert len(norms) >= 6 and all(ours == pytest.approx(wanted, rel=0.05) for wanted, ours in norms)
    rates = distributed.make_scaler("fp16", torch.device("cpu"))
    assert rates.get_scale() == 65536 and distributed.make_scaler("bf16", torch.device("cpu")) is None


def test_label_smoothing_is_for_training_alone(tmp_path):
    _, plain = trained(tmp_path / "plain", loaded=dot_model(), task=Dots(), duration="1st")
    _, smooth = trained(tmp_path / "smooth", loaded=dot_model(), task=Dots(), duration="1st", label_smoothing=0.2)
    rows = data_loader.epoch_order(0, 0, 64)[:16]
    batch = Dots().batch("train", rows, seed=0, epoch=0)
    logits = dot_model().model(batch["pixel_values"])
    wanted = F.cross_entropy(logits, batch["labels"], label_smoothing=0.2).item()
    assert losses(smooth)[0] == pytest.approx(wanted, abs=1e-6)
    assert losses(smooth, "eval")[0] == losses(plain, "eval")[0]
    with pytest.raises(UsageError, match="label_smoothing is for classification"):
        trained(tmp_path / "words", label_smoothing=0.1)


def test_compiling_and_averaging_leave_the_names_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "COMPILE_BACKEND", "eager")
    _, plain = trained(tmp_path / "plain")
    summary, compiled = trained(tmp_path / "compiled", compile=True, ema={"decay": 0.5})
    assert losses(compiled) == pytest.approx(losses(plain), abs=1e-5)
    saved = torch.load(tmp_path / "compiled" / "run" / "model" / "weights.pt", weights_only=True)
    assert saved.keys() == word_model().model.state_dict().keys()
    assert summary["status"] == "done"


def test_activations_are_forgotten_and_gradients_are_the_same():
    import timm
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    small = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=11)
    vit = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=12, num_heads=2, num_classes=3, img_size=32)
    inputs = (torch.arange(8)[None], torch.randn(2, 3, 32, 32))
    for model, x in zip((BertForMaskedLM(small), vit), inputs, strict=True):
        gradients = []
        for again in (False, True):
            if again:
                checkpoint_activations(model, "x")
            torch.manual_seed(1)
            model.train()
            model.zero_grad()
            out = model(x)
            (out if torch.is_tensor(out) else out.logits).pow(2).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))
    with pytest.raises(UsageError, match=r"\bWordModel\b.*--checkpointing\b"):
        checkpoint_activations(word_model().model, "WordModel")


def test_flops_are_those_of_the_formula():
    """A ViT: 2 FLOPs a multiply-add, forward once and backward twice (input and weight gradients)."""
    import timm

    from tests.support.training_standin import StandIn

    width, depth, tokens, mlp = 32, 2, 17, 64
    model = timm.create_model(
        "vit_tiny_patch16_224", depth=depth, embed_dim=width, num_heads=2, num_classes=3, img_size=64, mlp_ratio=2
    )
    batch = {"pixel_values": torch.randn(1, 3, 64, 64), "labels": torch.zeros(1, dtype=torch.int64)}
    found = flops.of_training(StandIn(model, "pixel_values"), Dots(), batch)
    block = 2 * tokens * (4 * width**2 + 2 * width * mlp) + 4 * tokens**2 * width
    embed, head = 2 * 16 * 3 * 16 * 16 * width, 2 * width * 3
    wanted = 3 * (depth * block + head) + 2 * embed  # no gradient for the pixels
    assert found == wanted
