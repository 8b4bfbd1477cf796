"""Crammed BERT against the published code's mathematics, by hand in numpy on tensors in the published converted."""

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.foreign.converted import convert_crammed_bert, is_crammed_bert
from leansurgeon.errors import UnsupportedModel
from leansurgeon.models.crammed_bert import (
    CrammedBertConfig,
    CrammedBertForMaskedLM,
    CrammedBertForSequenceClassification,
)
from tests.models.by_hand import Numbers, gelu, softmax

LAYERS, HEADS, WIDTH, MLP, VOCAB, POSITIONS, LABELS, POOLED = 2, 3, 24, 10, 40, 16, 4, 14


def published_config(**changes):
    arch = {
        "num_transformer_layers": LAYERS,
        "hidden_size": WIDTH,
        "intermed_size": 2 * MLP,
        "hidden_dropout_prob": 0.1,
        "norm": "LayerNorm",
        "norm_eps": 1e-12,
        "norm_scheme": "pre",
        "nonlin": "GELUglu",
        "tie_weights": True,
        "decoder_bias": False,
        "skip_head_transform": True,
        "use_bias": False,
        "final_norm": True,
        "embedding": {
            "vocab_size": VOCAB,
            "pos_embedding": "scaled-sinusoidal",
            "pad_token_id": 0,
            "max_seq_length": POSITIONS,
            "embedding_dim": WIDTH,
            "normalization": True,
        },
        "attention": {
            "type": "self-attention",
            "num_attention_heads": HEADS,
            "qkv_bias": False,
            "rotary_embedding": False,
        },
        "classification_head": {"pooler": "zero_index", "head_dim": POOLED, "nonlin": "Tanh"},
        "num_labels": LABELS,
    }
    return {"model_type": "crammedBERT", "arch": arch | changes}


def published_tensors(classifier=False):
    random = np.random.default_rng(0)

    def draw(*shape):
        return random.normal(0, 0.3, shape).astype(np.float32)

    tensors = {
        "encoder.embedding.word_embedding.weight": draw(VOCAB, WIDTH),
        "encoder.embedding.pos_embedding.scale_factor": draw(1),
        "encoder.embedding.norm.weight": 1 + draw(WIDTH),
        "encoder.embedding.norm.bias": draw(WIDTH),
        "encoder.final_norm.weight": 1 + draw(WIDTH),
        "encoder.final_norm.bias": draw(WIDTH),
    }
    for i in range(LAYERS):
        tensors |= {
            f"encoder.layers.{i}.attn.self_attention.query_key_value.weight": draw(3 * WIDTH, WIDTH),
            f"encoder.layers.{i}.attn.self_attention.norm_factor": np.float32((WIDTH // HEADS) ** -0.5),
            f"encoder.layers.{i}.attn.dense.weight": draw(WIDTH, WIDTH),
            f"encoder.layers.{i}.ffn.dense_in.weight": draw(2 * MLP, WIDTH),
            f"encoder.layers.{i}.ffn.dense_out.weight": draw(WIDTH, MLP),
        }
        for norm in ("norm1", "norm2"):
            tensors[f"encoder.layers.{i}.{norm}.weight"] = 1 + draw(WIDTH)
            tensors[f"encoder.layers.{i}.{norm}.bias"] = draw(WIDTH)
    if classifier:
        tensors |= {"pooler.dense.weight": draw(POOLED, WIDTH), "pooler.dense.bias": draw(POOLED)}
        tensors |= {"head.weight": draw(LABELS, POOLED), "head.bias": draw(LABELS)}
    else:
        tensors["decoder.weight"] = tensors["encoder.embedding.word_embedding.weight"]
    return tensors


def by_hand(tensors, ids, mask):
    """Hidden states `(batch, tokens, width)` in float64, in the order of the published forward pass."""
    n, d = Numbers(tensors, eps=1e-12), WIDTH // HEADS
    pairs = np.arange(WIDTH) // 2 * 2
    angles = np.arange(ids.shape[1])[:, None] / 10000 ** (pairs / WIDTH)
    table = np.where(np.arange(WIDTH) % 2 == 0, np.sin(angles), np.cos(angles))
    x = n.t["encoder.embedding.word_embedding.weight"][ids]
    x = n.norm(x + n.t["encoder.embedding.pos_embedding.scale_factor"] * table, "encoder.embedding.norm")
    for i in range(LAYERS):
        layer = f"encoder.layers.{i}."
        fused = n.linear(n.norm(x, layer + "norm1"), layer + "attn.self_attention.query_key_value")
        # There: view(seq, batch, heads, 3 * head_dim), then split along the last axis.
        q, k, v = np.split(fused.reshape(*ids.shape, HEADS, 3 * d).swapaxes(1, 2), 3, axis=-1)
        weights = softmax(q @ k.swapaxes(2, 3) * d**-0.5 - 10000.0 * (1 - mask[:, None, None, :]))
        heads = (weights @ v).swapaxes(1, 2).reshape(x.shape)
        x = x + n.linear(heads, layer + "attn.dense")
        value, gate = np.split(n.linear(n.norm(x, layer + "norm2"), layer + "ffn.dense_in"), 2, axis=-1)
        x = x + n.linear(gelu(gate) * value, layer + "ffn.dense_out")
    return n.norm(x, "encoder.final_norm")


def converted(tensors, cls):
    config, arrays = convert_crammed_bert(published_config(), tensors.__getitem__, list(tensors))
    assert config["architectures"] == [cls.__name__]
    model = cls(CrammedBertConfig.from_dict(config)).eval()
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"decoder.weight"}
    model.tie_weights()
    return model


@pytest.mark.parametrize("classifier", [False, True])
@torch.no_grad()
def test_published_weights_give_the_same_logits_after_conversion(classifier):
    random = np.random.default_rng(1)
    ids, mask = random.integers(1, VOCAB, (3, 11)), np.ones((3, 11), int)
    ids[1, 7:] = mask[1, 7:] = 0
    tensors = published_tensors(classifier)
    hidden = by_hand(tensors, ids, mask)
    if classifier:
        model = converted(tensors, CrammedBertForSequenceClassification)
        pooled = np.tanh(hidden[:, 0] @ tensors["pooler.dense.weight"].T + tensors["pooler.dense.bias"])
        expected = pooled @ tensors["head.weight"].T + tensors["head.bias"]
    else:
        model = converted(tensors, CrammedBertForMaskedLM)
        expected = hidden @ tensors["encoder.embedding.word_embedding.weight"].T
    logits = model(torch.from_numpy(ids), torch.from_numpy(mask)).logits
    np.testing.assert_allclose(logits.numpy(), expected, atol=2e-5, rtol=1e-4)


def test_the_embedding_is_found_under_either_of_its_two_names():
    tensors = published_tensors()
    del tensors["encoder.embedding.word_embedding.weight"]
    model = converted(tensors, CrammedBertForMaskedLM)
    assert torch.equal(model.decoder.weight, torch.from_numpy(tensors["decoder.weight"]))


def test_recognises_only_the_published_layout():
    assert is_crammed_bert(published_config(), [])
    assert is_crammed_bert({}, published_tensors())
    assert not is_crammed_bert({"model_type": "bert"}, ["bert.encoder.layer.0.attention.self.query.weight"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nonlin": "GELU"}, "arch.nonlin = "),
        ({"use_bias": True}, "arch.use_bias = "),
        ({"norm": "RMSNorm"}, "arch.norm = "),
        ({"num_transformer_layers": 1}, r"\b1 layer\."),
        ({"num_transformer_layers": 3}, r"lacks 'encoder\.layers\.2"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(change, says):
    tensors = published_tensors()
    with pytest.raises(UnsupportedModel, match=says):
        convert_crammed_bert(published_config(**change), tensors.__getitem__, list(tensors))


def small(**changes):
    torch.manual_seed(0)
    numbers = dict(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=5, head_dim=6)
    return CrammedBertConfig(**numbers | dict(intermediate_size=20, max_position_embeddings=16) | changes)


def test_the_masked_lm_loss_is_the_mean_over_labelled_tokens():
    model = CrammedBertForMaskedLM(small()).eval()
    ids = torch.randint(1, 50, (2, 9))
    labels = torch.full((2, 9), -100)
    labels[0, 3], labels[1, 5] = 7, 9
    out = model(ids, labels=labels)
    chosen = torch.log_softmax(out.logits, -1)[[0, 1], [3, 5], [7, 9]]
    torch.testing.assert_close(out.loss, -chosen.mean())


def test_too_many_tokens_are_named():
    with pytest.raises(ValueError, match="17 tokens, but max_position_embeddings is 16"):
        CrammedBertForMaskedLM(small())(torch.ones(1, 17, dtype=torch.long))
