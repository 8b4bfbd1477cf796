"""What `Loaded.forward` asks of a library's model."""

import pytest
import torch

from leansurgeon.checkpoints.model import Loaded
from tests.conftest import architecture, build, example


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
def test_no_keys_and_values_are_kept_for_a_next_token(family):
    model, said = build(family), []
    model.register_forward_hook(lambda _module, _args, out: said.append(out))
    batch = example(model)
    logits = Loaded(model, architecture(family), model.config.to_dict(), None, None).forward(batch)
    assert torch.allclose(model(**batch).logits, logits, atol=1e-4)
    assert said[0].get("past_key_values") is None
    assert (said[1].get("past_key_values") is not None) == (family != "bert")
