"""Crammed BERT against the published code's mathematics, by hand in numpy on tensors in the published converted."""

import math

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


def by_hand(t, ids, mask):
    """Hidden states `(batch, tokens, width)` in float64, in the order of the published forward pass."""
    t = {k: np.asarray(v, np.float64) for k, v in t.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * t[name + ".weight"] + t[name + ".bias"]

    def gelu(x):
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    tokens, d = ids.shape[1], WIDTH // HEADS
    table = np.array(
        [
            [(math.sin if c % 2 == 0 else math.cos)(p / 10000 ** ((c - c % 2) / WIDTH)) for c in range(WIDTH)]
            for p in range(tokens)
        ]
    )
    x = t["encoder.embedding.word_embedding.weight"][ids] + t["encoder.embedding.pos_embedding.scale_factor"] * table
    x = norm(x, "encoder.embedding.norm")
    for i in range(LAYERS):
        layer = f"encoder.layers.{i}."
        fused = norm(x, layer + "norm1") @ t[layer + "attn.self_attention.query_key_value.weight"].T
        # There: view(seq, batch, heads, 3 * head_dim), then split along the last axis.
        fused = fused.reshape(*ids.shape, HEADS, 3 * d)
        heads = []
        for h in range(HEADS):
            q, k, v = fused[:, :, h, :d], fused[:, :, h, d : 2 * d], fused[:, :, h, 2 * d :]
            scores = q @ k.swapaxes(1, 2) * d**-0.5 - 10000.0 * (1 - mask[:, None, :])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(heads, -1) @ t[layer + "attn.dense.weight"].T
        value, gate = np.split(norm(x, layer + "norm2") @ t[layer + "ffn.dense_in.weight"].T, 2, axis=-1)
        x = x + (gelu(gate) * value) @ t[layer + "ffn.dense_out.weight"].T
    return norm(x, "encoder.final_norm")


def converted(tensors, cls, config=None):
    new_config, arrays = convert_crammed_bert(config or published_config(), tensors.__getitem__, list(tensors))
    assert new_config["architectures"] == [cls.__name__]
    model = cls(CrammedBertConfig.from_dict(new_config)).eval()
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"decoder.weight"}
    model.tie_weights()
    return model


@pytest.fixture
def batch():
    random = np.random.default_rng(1)
    ids, mask = random.integers(1, VOCAB, (3, 11)), np.ones((3, 11))
    ids[1, 7:] = mask[1, 7:] = 0
    return ids, mask


def test_published_masked_lm_gives_the_same_logits_after_conversion(batch):
    ids, mask = batch
    tensors = published_tensors()
    model = converted(tensors, CrammedBertForMaskedLM)
    expected = by_hand(tensors, ids, mask) @ tensors["encoder.embedding.word_embedding.weight"].T.astype(np.float64)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids), torch.from_numpy(mask).long()).logits
    np.testing.assert_allclose(logits.numpy(), expected, atol=2e-5, rtol=1e-4)


def test_published_classifier_gives_the_same_logits_after_conversion(batch):
    ids, mask = batch
    tensors = published_tensors(classifier=True)
    model = converted(tensors, CrammedBertForSequenceClassification)
    first = by_hand(tensors, ids, mask)[:, 0]
    pooled = np.tanh(first @ tensors["pooler.dense.weight"].T + tensors["pooler.dense.bias"])
    expected = pooled @ tensors["head.weight"].T + tensors["head.bias"]
    with torch.no_grad():
        logits = model(torch.from_numpy(ids), torch.from_numpy(mask).long()).logits
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
    ("change", "word"),
    [({"nonlin": "GELU"}, "nonlin"), ({"use_bias": True}, "use_bias"), ({"norm": "RMSNorm"}, "norm")],
)
def test_variants_of_the_published_code_are_refused_by_name(change, word):
    tensors = published_tensors()
    with pytest.raises(UnsupportedModel, match=f"arch.{word} = "):
        convert_crammed_bert(published_config(**change), tensors.__getitem__, list(tensors))


def test_a_layer_too_many_or_too_few_is_refused():
    tensors = published_tensors()
    with pytest.raises(UnsupportedModel, match=r"\b1 layer\."):
        convert_crammed_bert(published_config(num_transformer_layers=1), tensors.__getitem__, list(tensors))
    with pytest.raises(UnsupportedModel, match=r"lacks 'encoder\.layers\.2"):
        convert_crammed_bert(published_config(num_transformer_layers=3), tensors.__getitem__, list(tensors))


def small(**changes):
    torch.manual_seed(0)
    numbers = dict(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=5, head_dim=6)
    return CrammedBertConfig(**numbers | dict(intermediate_size=20, max_position_embeddings=16) | changes)


@pytest.mark.parametrize("cls", [CrammedBertForMaskedLM, CrammedBertForSequenceClassification])
def test_gradients_reach_every_parameter(cls):
    model = cls(small(num_labels=3))
    labels = torch.randint(0, 50, (2, 9)) if cls is CrammedBertForMaskedLM else torch.tensor([0, 2])
    model(torch.randint(1, 50, (2, 9)), labels=labels).loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


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
