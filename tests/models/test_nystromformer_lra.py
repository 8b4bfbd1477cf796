"""The LRA classifier against plain attention, transformers' Nystromformer, and the benchmark's formulas in numpy."""

import math

import numpy as np
import pytest
import torch
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from leansurgeon.models.nystromformer_lra import (
    NystromformerLraConfig,
    NystromformerLraForSequenceClassification,
    nystrom_attention,
)
from tests.models.by_hand import Numbers, gelu, softmax


def small(**changes):
    torch.manual_seed(0)
    numbers = dict(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=3, head_dim=5)
    numbers |= dict(intermediate_size=24, classifier_hidden_size=20, max_position_embeddings=32, num_landmarks=8)
    config = NystromformerLraConfig(**numbers | dict(num_labels=4) | changes)
    model = NystromformerLraForSequenceClassification(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model.eval()


def by_hand(model, ids, mask):
    """Logits of one sequence that is padded to the position table, by plain attention in float64."""
    n, config = Numbers(model.state_dict()), model.config
    x = n.t["encoder.token_embeddings.weight"][ids] + n.t["encoder.position_embeddings.weight"]
    for i in range(config.num_hidden_layers):
        layer = f"encoder.layers.{i}."

        def attend(head, q, k, v, layer=layer):
            out = softmax(q @ k.T / math.sqrt(q.shape[1]) - 1e9 * (1 - mask[None])) @ v
            if config.conv_kernel_size:
                kernel = n.t[layer + "attention.conv.weight"][head, 0, :, 0]
                # torch convolves without turning the kernel round, numpy turns it
                out = out + np.stack([np.convolve(c, kernel[::-1], "same") for c in (v * mask[:, None]).T], 1)
            return out

        x = n.block(x, layer, config.num_attention_heads, attend, gelu)
    pooled = (n.norm(x, "encoder.final_norm") * mask[:, None]).mean(0)  # over the padded length, as the benchmark does
    return n.linear(np.maximum(n.linear(pooled, "classifier_hidden"), 0), "classifier")


def padded_to_table(length=21):
    random = np.random.default_rng(3)
    ids, mask = np.zeros(32, int), np.zeros(32)
    ids[:length], mask[:length] = random.integers(1, 30, length), 1
    return ids, mask


@pytest.mark.parametrize("changes", [{"attention": "softmax"}, {"num_landmarks": 32}, {"num_landmarks": 64}])
@pytest.mark.parametrize("conv", [None, 5])
def test_softmax_and_as_many_landmarks_as_positions_are_plain_attention(changes, conv):
    model = small(conv_kernel_size=conv, **changes)
    ids, mask = padded_to_table()
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None], torch.from_numpy(mask)[None].long()).logits[0]
    np.testing.assert_allclose(logits.numpy(), by_hand(model, ids, mask), atol=2e-4, rtol=1e-4)


def test_nystrom_attention_equals_that_of_transformers():
    torch.manual_seed(0)
    config = NystromformerConfig(hidden_size=12, num_attention_heads=3, num_landmarks=4, segment_means_seq_len=20)
    theirs = NystromformerSelfAttention(config).eval()
    theirs.conv_kernel_size = None
    theirs.init_option = "per head"  # anything but "original", which takes one maximum over the batch
    x = torch.randn(2, 20, 12)
    with torch.no_grad():
        expected = theirs(x, torch.zeros(2, 1, 1, 20))[0]
        q, k, v = (getattr(theirs, n)(x).unflatten(-1, (3, 4)).transpose(1, 2) for n in ("query", "key", "value"))
        ours = nystrom_attention(q, k, v, None, segment=5, count=4, iterations=6).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"attention": "softmax"}, {"conv_kernel_size": 5}, {"pooling": "mean"}])
def test_neither_padding_nor_the_rest_of_the_batch_changes_a_result(changes):
    model, (ids, mask) = small(**changes), padded_to_table()
    ids, mask = torch.from_numpy(ids)[None], torch.from_numpy(mask)[None].long()
    with torch.no_grad():
        alone = model(ids[:, :21]).logits
        for length in (21, 26, 32):
            got = model(ids[:, :length], mask[:, :length]).logits
            torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-4)
        other = torch.randint(1, 30, (3, 32))
        both = model(torch.cat((ids, other)), torch.cat((mask, torch.ones_like(other)))).logits[:1]
    torch.testing.assert_close(both, alone, atol=1e-5, rtol=1e-4)


def test_mean_pooling_divides_by_the_real_tokens():
    x = torch.ones(1, 6, 16)
    x[0, 3:] = 7
    torch.testing.assert_close(small(pooling="mean").pool(x, torch.tensor([[1, 1, 1, 0, 0, 0]])), torch.ones(1, 16))


def test_two_inputs_share_the_encoder():
    model = small(dual_input=True, num_labels=2)
    (a, mask), b = padded_to_table(), padded_to_table(9)
    a, b, mask = (torch.from_numpy(x)[None] for x in (a, b[0], mask))
    other = torch.zeros_like(mask)
    other[:, :9] = 1
    with torch.no_grad():
        x, y = (model.pool(model.encoder(i, m).last_hidden_state, m) for i, m in ((a, mask), (b, other)))
        parts = torch.cat((x, y, x * y, x - y), -1).float()
        expected = model.classifier(torch.relu(model.classifier_hidden(parts)))
        got = model(a, mask.long(), input_ids_2=b, attention_mask_2=other.long()).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="dual_input is True"):
        model(a, mask)


def test_half_precision_training_keeps_the_pseudo_inverse_whole():
    model, ids = small(), torch.randint(1, 30, (2, 32))
    with torch.no_grad():
        exact = model(ids).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(ids).logits
    assert (half.float() - exact).abs().max() < 0.1 * exact.abs().max()


def test_fresh_linear_layers_start_as_torch_starts_them():
    torch.manual_seed(0)
    model = NystromformerLraForSequenceClassification(NystromformerLraConfig())
    weight = model.encoder.layers[0].attention.query.weight
    assert weight.abs().max() <= 1 / 8
    assert weight.std().item() == pytest.approx(1 / (8 * math.sqrt(3)), rel=0.05)
    assert model.encoder.token_embeddings.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_unknown_choices_are_named():
    with pytest.raises(ValueError, match="attention is "):
        small(attention="linear")
