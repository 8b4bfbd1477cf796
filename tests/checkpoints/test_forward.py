"""What `Loaded.forward` asks of a library's model."""

import pytest
import torch

from leansurgeon.checkpoints.model import Loaded
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
