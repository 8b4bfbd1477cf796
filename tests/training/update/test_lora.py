"""LoRA: only adapters learn, and what is saved is a plain checkpoint that says what the adapted model says."""

import pytest
import torch
import transformers

from leansurgeon import tasks
from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.training import regularize
from leansurgeon.training.recipe.schema import Lora
from tests.support.models import strangers


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_it_computes_the_same_and_is_plain(tmp_path, family):
    folder = strangers.model(tmp_path / "own", family)
    loaded = checkpoints.load(folder)
    loaded.model.eval()
    regularize.add_lora(loaded, Lora(rank=3), tasks.make("causal-lm"))
    learning = {name for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert learning and all("lora_" in name for name in learning)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    batch = {"input_ids": torch.arange(3, 23).reshape(2, 10)}
    with torch.no_grad():
        wanted = loaded.forward(batch)
        plain = checkpoints.load(folder).model.eval()
        assert not torch.allclose(plain(**batch).logits, wanted, atol=1e-2)
    regularize.merge_lora(loaded).save(tmp_path / "merged")
    model, info = type(plain).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.allclose(model.eval()(**batch).logits, wanted, atol=1e-4)
        assert torch.allclose(loaded.forward(batch), wanted)  # the adapted model is as it was
    assert loaded.info["parameters"] == sum(p.numel() for p in plain.parameters())


def test_healing_by_adapters_leaves_a_plain_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    source = strangers.model(tmp_path / "source", "llama")
    lean = strangers.halved(tmp_path / "lean", source)
    done = strangers.healed(lean, strangers.texts(tmp_path / "texts"), tmp_path / "run", "--lora", 4)
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    before = transformers.AutoModelForCausalLM.from_pretrained(lean).state_dict()
    after = model.state_dict()
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("proj.weight" in name and "layers." in name for name in moved)
    change = (after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]).double()
    assert torch.linalg.matrix_rank(change, rtol=1e-4) <= 4
