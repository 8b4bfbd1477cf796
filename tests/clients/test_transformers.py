"""transformers itself: pipelines with the cache, Trainer; and adapters of peft."""

from __future__ import annotations

import pytest
import torch

from tests.clients.cells import kinds
from tests.clients.conftest import inputs_of, loaded, logits_of
from tests.support.models.word_models import WORDS

pytestmark = pytest.mark.clients
TASKS = {"llama": "text-generation", "gpt2": "text-generation", "bert": "fill-mask", "vit": "image-classification"}


@kinds("transformers pipelines")
def test_pipelines_answer_as_the_model_does(kind, cut):
    from transformers import pipeline

    task, own = TASKS[kind.removesuffix("-own")], kind.endswith("-own")
    pipe = pipeline(task, model=str(cut(kind)), dtype=torch.float32, trust_remote_code=own)
    model = loaded(cut(kind), kind)
    if task == "text-generation":
        prompt = " ".join(WORDS[:6])
        found = {}
        for cache in (True, False):
            settings = {"max_new_tokens": 16, "do_sample": False, "use_cache": cache, "return_tensors": True}
            found[cache] = pipe(prompt, **settings)[0]["generated_token_ids"]
        ids = pipe.tokenizer(prompt, return_tensors="pt").input_ids
        for _ in range(16):  # greedy by hand, without a cache
            ids = torch.cat([ids, logits_of(model, {"input_ids": ids})[:, -1:].argmax(-1)], dim=1)
        stop = list(found[True])
        assert stop == found[False] == ids[0, : len(stop)].tolist()
        assert len(stop) > pipe.tokenizer(prompt, return_tensors="pt").input_ids.shape[1]
    elif task == "fill-mask":
        text = f"{WORDS[0]} {pipe.tokenizer.mask_token} {WORDS[2]}"
        batch = pipe.tokenizer(text, return_tensors="pt")
        place = int((batch.input_ids[0] == pipe.tokenizer.mask_token_id).nonzero()[0])
        wanted = logits_of(model, {"input_ids": batch.input_ids})[0, place].softmax(-1).topk(3)
        found = pipe(text, top_k=3)
        assert [one["token"] for one in found] == wanted.indices.tolist()
        assert [one["score"] for one in found] == pytest.approx(wanted.values.tolist(), rel=1e-4)
    else:
        from PIL import Image

        image = Image.effect_noise((8, 8), 60).convert("RGB")
        pixels = pipe.image_processor(image, return_tensors="pt").pixel_values
        wanted = logits_of(model, {"pixel_values": pixels})[0].softmax(-1)
        found = {one["label"]: one["score"] for one in pipe(image, top_k=10)}
        labels = model.config.id2label
        assert found == pytest.approx({labels[i]: float(wanted[i]) for i in range(10)}, rel=1e-4)


@kinds("Trainer")
def test_trainer_learns_and_saves_what_loads_again(kind, cut, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = loaded(cut(kind), kind)
    inputs = inputs_of(kind)
    labels = torch.tensor([1, 2]) if kind == "vit" else inputs["input_ids"]
    rows = [{key: value[i] for key, value in (inputs | {"labels": labels}).items()} for i in (0, 1)] * 4
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=8, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    again = loaded(tmp_path / "saved", kind)
    assert torch.equal(logits_of(again, inputs), logits_of(model.eval(), inputs))


@kinds("peft")
def test_adapters_learn_and_merge_into_the_same_function(kind, cut, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    inputs = inputs_of(kind)
    plain = logits_of(loaded(cut(kind), kind), inputs)
    targets = ["q_proj", "o_proj"] if kind == "llama" else ["c_attn"]
    settings = LoraConfig(r=4, target_modules=targets, fan_in_fan_out=kind != "llama", task_type="CAUSAL_LM")
    model = get_peft_model(loaded(cut(kind), kind), settings)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted = logits_of(model.eval(), inputs)
    assert not torch.allclose(adapted, plain, atol=1e-3)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(loaded(cut(kind), kind), tmp_path / "adapter")
    merged = again.merge_and_unload()
    assert torch.allclose(logits_of(merged, inputs), adapted, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    for code in cut(kind).glob("*.py"):  # peft's base model was loaded with its code, which saving brings along
        assert (tmp_path / "merged" / code.name).exists()
    assert torch.allclose(logits_of(loaded(tmp_path / "merged", kind), inputs), adapted, atol=1e-4)
