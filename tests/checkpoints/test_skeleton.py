"""A model run block by block, its blocks filled and emptied one at a time, against the library's own forward."""

import json

import numpy as np
import pytest
import torch

from leansurgeon import architectures
from leansurgeon.checkpoints.blockwise.skeleton import Skeleton, build_on_meta
from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.family import convert_config
from leansurgeon.checkpoints.model import initialise, load, save_model
from leansurgeon.checkpoints.source import open_source
from leansurgeon.checkpoints.weights import FLOATS
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel
from tests import conftest
from tests.surgery import test_timm_families as timm_families

TRANSFORMERS = list(conftest.FAMILIES)
TIMM = [f"timm-{key}" for key in timm_families.FAMILIES]
TEXT = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, head_dim=12, intermediate_size=48)
OURS = {  # preset -> a tiny form of it
    "bert-crammed": TEXT | dict(vocab_size=61, max_position_embeddings=40),
    "gpt2-tinystories": TEXT | dict(vocab_size=61, max_position_embeddings=40),
    "lra/text": TEXT | dict(vocab_size=61, max_position_embeddings=40, num_landmarks=4),
}
DECOUPLED = ["lean-bert", "lean-roberta", "lean-gpt2"]
CASES = [*TRANSFORMERS, *TIMM, *OURS, *DECOUPLED]
# Families that cannot be run block by block, and what the error must say.
REFUSED = {
    "timm-tnt": "passes on 2 tensors",  # pixels and patches
}
# transformers 5.23 adds a mask of the tokens to scores between landmarks, and fails by itself.
NO_PADDING = ("nystromformer",)


def make(key: str, folder):
    """A tiny model of a family on disk: (Source, the library's model of that folder)."""
    if key in OURS:
        preset = open_source(key, config_changes=OURS[key])
        write(preset.config, preset.architecture, folder)
    elif key in DECOUPLED:
        conftest.build(key.removeprefix("lean-")).save_pretrained(folder)
        source = open_source(str(folder))
        target = conftest.architecture(source.architecture.decoupled)
        config = convert_config(source.config, source.architecture, target)
        write(target.with_shape(config, source.shape.with_(heads=5, kv_heads=5, head_dim=6)), target, folder)
    elif key in TIMM:
        timm_families.save_small(key.removeprefix("timm-"), folder)
    else:
        conftest.build(key).save_pretrained(folder)
    return open_source(str(folder)), load(folder).model.eval()


def write(config, architecture, folder):
    model = initialise(config, architecture, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    save_model(model, architecture, config, folder)


def batches(source, model) -> list[dict]:
    """Two batches of other sizes; the second with padding where the model takes a mask."""
    if source.architecture.library == "timm":
        return [{"pixel_values": timm_families.image(n), "labels": torch.zeros(n)} for n in (2, 3)]
    first = conftest.example(model)
    second = {k: v[:2].clone() for k, v in first.items()}
    if "input_ids" in first and not any(name in source.architecture.name for name in NO_PADDING):
        second["input_ids"] = second["input_ids"][:, :8]
        second["attention_mask"] = second["attention_mask"][:, :8].clone()
        second["attention_mask"][1, 5:] = 0
    return [first, second | {"labels": torch.zeros(2)}]


def of_layer(source, layer):
    return {s.name: source.weights.float32(s.name) for s in source.specs if s.layer == layer}


def expected(source, model, batch):
    batch = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        out = model(batch["pixel_values"]) if source.architecture.library == "timm" else model(**batch)
    return out if isinstance(out, torch.Tensor) else out["logits"] if "logits" in out else out["last_hidden_state"]


def opened(source):
    skeleton = Skeleton(source.config, source.architecture)
    skeleton.fill_outer(source.weights.float32)
    return skeleton


def resident(skeleton):
    return sum(p.numel() for p in skeleton.model.parameters() if not p.is_meta)


def through(stream, source, look=lambda layer, tensors: None):
    """The outputs of a stream that has gone through all blocks, of which one at a time is filled."""
    skeleton = stream.skeleton
    for layer in range(skeleton.depth):
        tensors = of_layer(source, layer)
        skeleton.fill(layer, tensors)
        stream.advance(stream.run())
        look(layer, tensors)
        skeleton.empty(layer)
    return stream.finish()


@pytest.mark.parametrize("key", CASES)
def test_block_by_block_is_the_librarys_forward(key, tmp_path):
    source, model = make(key, tmp_path / "source")
    skeleton, inputs = opened(source), batches(source, model)
    outer = resident(skeleton)
    if key in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[key]):
            Stream(skeleton, inputs)
        return
    entered = []
    for layer in range(skeleton.depth):
        for module in skeleton.projections(layer):
            module.register_forward_pre_hook(lambda _, args, layer=layer: entered.append((layer, args[0].shape[-1])))

    def look(layer, tensors):
        assert 0 < resident(skeleton) - outer <= sum(array.size for array in tensors.values())
        stage = skeleton.shape.stages[next(s.stage for s in source.specs if s.layer == layer)]
        assert {width for at, width in entered if at == layer} == {stage.inner}  # the heads' outputs, before W_o
        numbers = {n for n in tensors if source.weights.entries[n].dtype in FLOATS}  # counters are nobody's to change
        read = skeleton.read(layer)
        assert read.keys() == {n for n in numbers if skeleton.bare(n) not in skeleton.shared}
        assert all(np.array_equal(read[n], tensors[n]) for n in read)

    stream = Stream(skeleton, inputs)
    entered.clear()
    for out, batch in zip(through(stream, source, look), inputs, strict=True):
        want = expected(source, model, batch)
        assert float((out - want).norm() / want.norm()) < 1e-6
    assert resident(skeleton) == outer


def test_one_block_at_a_time_is_all_that_is_resident():
    """24 layers of 25 million parameters (2.4 GB in fp32) are built and run with room for one of them."""
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=64, hidden_size=1408)
    config |= dict(num_hidden_layers=24, num_attention_heads=11, num_key_value_heads=11, intermediate_size=4096)
    config |= dict(tie_word_embeddings=True, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    arch = architectures.of(config)
    specs = list(arch.tensors(config))
    skeleton = Skeleton(config, arch)
    assert resident(skeleton) == 0
    skeleton.fill_outer({s.name: np.ones(s.shape, np.float32) for s in specs if s.layer is None}.__getitem__)
    outer = 65 * 1408
    stream = Stream(skeleton, [{"input_ids": torch.ones(1, 3, dtype=torch.long)}])
    assert resident(skeleton) == outer  # tied: the head is the embedding
    for layer in (0, 23):
        inside = {s.name: np.zeros(s.shape, np.float32) for s in specs if s.layer == layer}
        skeleton.fill(layer, inside)
        assert resident(skeleton) == outer + sum(a.size for a in inside.values())
        stream.advance(stream.run(layer))  # a block of zeros lets its input through
        skeleton.empty(layer)
    assert torch.equal(stream.hidden[0], torch.ones(1, 3, 1408))
    with pytest.raises(LeanSurgeonError, match="before block 2 of 24"):
        stream.finish()


def test_a_bf16_checkpoint_runs_in_fp32(tmp_path):
    folder = tmp_path / "source"
    conftest.build("llama").bfloat16().save_pretrained(folder)
    source, model = open_source(str(folder)), load(folder).model.eval()
    inputs = batches(source, model)
    logits = through(Stream(opened(source), inputs), source)[0]
    assert source.config["dtype"] == "bfloat16" and logits.dtype == torch.float32
    assert torch.equal(logits, expected(source, model, inputs[0]))


def test_files_without_the_prefix_and_without_a_head_open(tmp_path):
    """A file of BertModel under a config of BertForMaskedLM: other names, and no prediction head."""
    folder = tmp_path / "source"
    whole = conftest.build("bert")
    whole.bert.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    source = open_source(str(folder))
    skeleton = opened(source)
    head = ("bias", "transform.LayerNorm.bias", "transform.LayerNorm.weight", "transform.dense.bias")
    own = [(name, p) for name, p in skeleton.model.named_parameters() if name.startswith("cls.")]
    zeros = {name for name, parameter in own if not parameter.any()}
    assert {f"cls.predictions.{name}" for name in (*head, "transform.dense.weight")} == zeros
    inputs = conftest.example(whole)
    stream = Stream(skeleton, [inputs])
    through(stream, source)
    with torch.no_grad():
        want = whole.bert(**inputs).last_hidden_state
    assert float((stream.hidden[0] - want).norm() / want.norm()) < 1e-6


def test_an_infinity_in_a_config_is_a_number_for_the_library(tmp_path):
    """transformers writes it as an object, and its classes refuse that (FalconH1's `time_step_limit`)."""
    conftest.build("llama").save_pretrained(tmp_path)
    source = open_source(str(tmp_path))
    config = source.config | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    for model in (build_on_meta(config, source.architecture), initialise(config, source.architecture, 0)):
        assert model.config.time_step_limit == [0.0, float("inf")]
