"""Predicted memory against torch's own tracker, against what the CPU really hands out, and against arithmetic."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.distributed._tools.mem_tracker import MemTracker

from leansurgeon import architectures
from leansurgeon.checkpoints.family import convert_config
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel
from leansurgeon.measure.costs import flops
from leansurgeon.measure.costs.memory import (
    Rehearsal,
    Setting,
    choose_attention,
    fake_model,
    make_optimizer,
    predict,
    step,
)
from leansurgeon.measure.data import inputs
from tests.conftest import FAMILIES, architecture, build
from tests.support.command_line import leansurgeon
from tests.support.published_memory import PUBLISHED, counted

GIB, MIB = 2**30, 2**20


def vit_b(depth: int = 12):
    """Config and architecture of ViT-B/16, or of its first blocks."""
    source = open_source("vit-b")
    family = source.architecture
    return family.with_shape(source.config, source.shape.with_(depth=depth)), family


def tiny(family: str, **changes):
    """Config and architecture of a tiny model of a family."""
    config_class, model_class, config = FAMILIES[family]
    config = getattr(transformers, config_class)(**(config | changes)).to_dict() | {"architectures": [model_class]}
    return config, architecture(family)


# -- against a real GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_a100_took_what_is_counted(attention):
    """6,964.659 and 3,961.013 MB for BERT with 16 x 512 tokens.

    All points: tests/benchmarks/memory/test_memory_published.py
    """
    point = next(p for p in PUBLISHED if (p.model, p.batch, p.tokens) == ("bert", 16, 512))
    assert counted(point, attention) == pytest.approx(getattr(point, attention), rel=0.02)


# -- against arithmetic ---------------------------------------------------------------------------


def by_hand(batch: int, eager: bool, bits: int, depth: int) -> float:
    """Bytes that autograd keeps of timm's ViT-B at 197 tokens: what each function's formula needs, written down.

    T = batch x 197 rows of 768. `n` is the size of a number in a matrix product, 4 that of the residual stream and the
    norms. A block: norm 1 keeps its input (4) and 2 statistics, qkv its input (n), attention q k v (3n), its output (n,
    which the projection keeps as its input), norm 2 its input (4), fc1 its input (n), GELU its input (4n), fc2 its
    input (4n). In fp32 the outputs of the norms are the inputs of the products; in bf16 those are copies, and the
    weights of the products are copied too.
    """
    n, rows, heads, tokens, width = bits // 8, batch * 197, 12, 197, 768
    block = rows * width * (4 + n + 3 * n + n + 4 + n + 4 * n + 4 * n)
    if eager:  # softmax keeps its output in fp32; the product with the values its copy; no dropout
        block += batch * heads * tokens * tokens * (4 + (n if bits == 16 else 0))
    else:
        block += batch * heads * tokens * 4
    if bits == 16:
        block += 12 * width * width * 2
    return depth * block


@pytest.mark.parametrize("attention, precision", [("sdpa", "bf16"), ("eager", "fp32")], ids=str)
def test_activations_of_vit_b_are_those_of_a_hand_count(attention, precision):
    """The embedding, the last norm, the head and the images add 5 % to four blocks; nothing may be missing."""
    config, family = vit_b(depth=4)
    found = predict(config, family, Setting(batch=128, attention=attention, precision=precision))
    hand = by_hand(128, attention == "eager", 16 if precision == "bf16" else 32, depth=4)
    assert 1.0 < found.activations / hand < 1.08
    weights = 4 * family.count(config).total
    assert found.weights == pytest.approx(weights, rel=0.002)
    assert found.optimizer == pytest.approx(2 * weights, rel=0.002)  # two moments
    assert found.when == "backward"


def test_ddp_adds_the_gradients_that_live_in_buckets():
    alone, together = (predict(*vit_b(2), Setting(batch=8, world_size=n)) for n in (1, 8))
    assert together.gradients == together.weights  # all fp32, and they are there when activations are largest
    assert together.activations == alone.activations
    assert together.total - alone.total == together.weights - alone.gradients


def test_sgd_has_one_moment_and_fp32_no_narrow_copies():
    adamw, sgd = (predict(*vit_b(2), Setting(batch=8, optimizer=o)) for o in ("adamw", "sgd"))
    assert adamw.optimizer - sgd.optimizer == pytest.approx(sgd.optimizer, rel=0.001)
    assert adamw.activations == sgd.activations


def test_checkpointing_keeps_only_the_inputs_of_blocks():
    config, family = vit_b(6)
    whole, again = (predict(config, family, Setting(batch=64, checkpointing=c)) for c in (False, True))
    stream = 64 * 197 * 768 * 4  # bytes of the residual stream, one for every block
    assert 6 * stream < again.activations < 10 * stream + 200 * MIB
    assert again.total < 0.6 * whole.total


def test_fused_attention_makes_heads_free_and_eager_does_not():
    """facts: splitting heads costs nothing with fused attention; eager pays one score matrix and its copy for each."""
    family = architectures.load_families()["leansurgeon_vit"]
    source = open_source("vit-b")
    start = convert_config(source.config, source.architecture, family)

    def total(heads: int, attention: str) -> int:
        shape = source.shape.with_(heads=heads, kv_heads=heads, head_dim=768 // heads, depth=2)
        return predict(family.with_shape(start, shape), family, Setting(batch=32, attention=attention)).total

    scores = 2 * 12 * 32 * 197 * 197 * 6  # two layers, twelve more heads, 4 + 2 bytes
    assert 0 <= total(24, "sdpa") - total(12, "sdpa") < 0.01 * total(12, "sdpa")
    assert total(24, "eager") - total(12, "eager") >= scores


# -- against other counters -----------------------------------------------------------------------


def test_the_count_agrees_with_torchs_tracker():
    """torch.distributed._tools.MemTracker, another implementation, on the same fake step without CUDA's rules."""
    config, family = vit_b(3)
    rehearsal = Rehearsal(config, family, Setting(batch=16, precision="bf16"), cuda=False)
    ours = rehearsal.peak().total
    model = fake_model(config, family, rehearsal.mode).train()
    with rehearsal.mode:
        optimizer = make_optimizer(model.parameters(), "adamw")
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                batch = inputs.make(config, family, 16, 1, "cpu")
                with torch.autocast("cpu", torch.bfloat16):
                    loss = inputs.loss(inputs.run(model, batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                del loss, batch
                tracker.reset_mod_stats()
        theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert ours == pytest.approx(theirs, rel=0.005)


@pytest.mark.parametrize(("family", "attention"), [("vit", "sdpa"), ("bert", "eager"), ("gpt2", "sdpa")])
def test_a_fake_step_counts_what_a_real_one_takes(family, attention):
    """The same step on real CPU tensors: the same storages, byte for byte."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 256}
    config, known = tiny(family, **sizes)
    tokens = 1 if family == "vit" else 32
    setting = Setting(batch=16, tokens=tokens, precision="fp32", attention=attention)
    model = build(family, **sizes).train()
    choose_attention(model, attention)
    real = step(model, setting, lambda: inputs.make(config, known, 16, tokens, "cpu"), cuda=False)
    assert real.peak == Rehearsal(config, known, setting, cuda=False).peak().total


# -- every family, and the largest batch ----------------------------------------------------------


@pytest.mark.parametrize("family", ["modernbert", "siglip_vision_model", "t5"])
def test_every_kind_of_family_can_be_predicted(family):
    config, known = tiny(family)
    tokens = None if family == "siglip_vision_model" else 8
    rehearsal = Rehearsal(config, known, Setting(batch=4, tokens=tokens))
    small, large = rehearsal.peak(), rehearsal.peak(8)
    assert 0 < small.activations < large.activations <= 2 * small.activations
    assert small.weights == large.weights


@pytest.mark.parametrize("count", ["memory", "operations"])
def test_a_real_model_of_the_same_size_runs_afterwards(count):
    """DINOv3 keeps coordinates of patches in a cache of the library, by their number alone."""
    config, known = tiny("dinov3_vit")
    if count == "memory":
        predict(config, known, Setting(batch=2))
    else:
        flops.count_flops(config, known)
    with torch.no_grad():
        found = build("dinov3_vit")(**inputs.make(config, known, 2, 1, "cpu")).last_hidden_state
    assert torch.isfinite(found).all()


def test_the_largest_batch_fits_and_the_next_does_not():
    rehearsal = Rehearsal(*vit_b(2), Setting(batch=4))
    room = 10**9
    most = rehearsal.largest_batch(room)
    assert rehearsal.peak(most).total <= room < rehearsal.peak(most + 2).total
    assert rehearsal.largest_batch(10**8) == 0


def test_models_without_made_up_samples_say_so():
    source = open_source("d-retrieval")
    with pytest.raises(UnsupportedModel, match=r"\bd_retrieval\b.*\bleansurgeon inspect\b"):
        predict(source.config, source.architecture, Setting())


@pytest.mark.parametrize("batch", [10**12, 10**20])
def test_a_batch_beyond_all_memory_is_one_sentence(batch):
    done = leansurgeon("plan", "gpt2-tinystories", "--heads", "16", f"--batch={batch}")
    assert done.returncode == 2 and "--batch" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("asked", ["sdpa", "eager"])
def test_attention_is_fused_only_where_the_library_has_it(asked):
    """Gemma 2 caps its scores, which no fused kernel does."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    numbers = sizes | dict(num_hidden_layers=2, vocab_size=61, pad_token_id=0)
    for name, found in (("Gemma2", "eager"), ("Gemma", asked)):
        config = getattr(transformers, f"{name}Config")(**numbers)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        choose_attention(model, asked)
        assert model.config._attn_implementation == found
