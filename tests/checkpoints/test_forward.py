"""What `Loaded.forward` asks of a library's model."""

from __future__ import annotations

import pytest
import torch

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.measure.costs.storages import Storages
from tests.conftest import architecture, build, example


def loaded_of(family: str) -> Loaded:
    model = build(family)
    return Loaded(model, architecture(family), model.config.to_dict(), None, None)


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
def test_no_keys_and_values_are_kept_for_a_next_token(family):
    loaded, said = loaded_of(family), []
    loaded.model.register_forward_hook(lambda _module, _args, out: said.append(out))
    batch = example(loaded.model)
    logits = loaded.forward(batch)
    assert torch.allclose(loaded.model(**batch).logits, logits, atol=1e-4)
    assert said[0].get("past_key_values") is None
    assert (said[1].get("past_key_values") is not None) == (family != "bert")


def test_a_forward_pass_leaves_that_much_less_behind():
    """Copies of keys and values for the backward pass: two of (samples, tokens, width) in fp32 for every layer."""
    loaded = loaded_of("gpt2")
    ids = torch.randint(3, 61, (8, 40))

    def kept(**more) -> int:
        loaded._no_cache = more
        with Storages("any", granule=1) as count:
            logits = loaded.forward({"input_ids": ids})
            return sum(count.live.values()) + 0 * len(logits)

    kept()
    assert kept(use_cache=True) - kept(use_cache=False) == 4 * 2 * 8 * 40 * 32 * 4
