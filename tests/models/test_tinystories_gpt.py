"""Tiny-Stories GPT against its formula, head by head in numpy."""

import numpy as np
import pytest
import torch

from leansurgeon.models.tinystories_gpt import TinyStoriesConfig, TinyStoriesForCausalLM
from tests.models.by_hand import Numbers, softmax


def small(**changes):
    torch.manual_seed(0)
    numbers = dict(vocab_size=40, hidden_size=20, num_hidden_layers=2, num_attention_heads=3, intermediate_size=28)
    model = TinyStoriesForCausalLM(TinyStoriesConfig(**numbers | dict(max_position_embeddings=12) | changes))
    for p in model.parameters():  # away from the small start, biases included, so that a slip shows
        torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def by_hand(model, ids):
    """Logits `(tokens, vocab)` of one sequence in float64."""
    n, config = Numbers(model.state_dict()), model.config
    x = n.t["model.token_embeddings.weight"][ids] + n.t["model.position_embeddings.weight"][: len(ids)]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."

        def rms(x, name, layer=layer):
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * n.t[f"{layer}attention.{name}_norm.weight"]

        def attend(_, q, k, v, rms=rms):
            if config.qk_norm:
                q, k = rms(q, "query"), rms(k, "key")
            scores = np.where(np.tri(len(ids)), q @ k.T * q.shape[1] ** -0.5, -np.inf)
            return softmax(scores) @ v

        x = n.block(x, layer, config.num_attention_heads, attend, lambda up: np.maximum(up, 0))
    return n.linear(n.norm(x, "model.final_norm"), "lm_head")


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("head_dim", [None, 6, 11])
def test_logits_follow_the_formula_whatever_the_head_dim(head_dim, qk_norm):
    model = small(head_dim=head_dim, qk_norm=qk_norm)
    assert model.model.layers[0].attention.head_dim == (head_dim or 20 // 3)
    ids = np.random.default_rng(0).integers(0, 40, (2, 9))
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)).logits.numpy()
    for row in range(2):
        np.testing.assert_allclose(logits[row], by_hand(model, ids[row]), atol=1e-4, rtol=1e-4)


def test_a_mask_of_ones_and_padding_at_the_end_change_nothing():
    model, ids = small(), torch.randint(1, 40, (2, 11))
    ids[:, 7:] = 0
    expected = model(ids[:, :7]).logits
    for seen in (7, 11):
        out = model(ids[:, :seen], ids[:, :seen].gt(0).long()).logits
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out[:, :7], expected, atol=1e-5, rtol=1e-5)


def test_the_loss_predicts_the_next_token():
    model, ids = small(), torch.randint(0, 40, (2, 8))
    out = model(ids, labels=ids)
    log_p = torch.log_softmax(out.logits, -1)
    expected = -torch.stack([log_p[b, t, ids[b, t + 1]] for b in range(2) for t in range(7)]).mean()
    torch.testing.assert_close(out.loss, expected)


def test_generation_is_greedy_over_a_sliding_window():
    model, ids = small(), torch.randint(0, 40, (1, 5))
    out = model.generate(ids, max_new_tokens=12, do_sample=False)
    expected = ids
    for _ in range(12):
        window = expected[:, -12:]
        expected = torch.cat((expected, model(window).logits[:, -1:].argmax(-1)), 1)
    assert out.tolist() == expected.tolist()
