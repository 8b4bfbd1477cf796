"""Which model a quantised one was made from."""

from __future__ import annotations

import pytest

from leansurgeon.reading.modelcard import base_model, where_to_get

CARDS = {
    "---\nlicense: mit\nbase_model: org/Model-7B\n---\n# Card": "org/Model-7B",
    "---\nbase_model:\n- org/Model-7B\n- other/Merged\n---\n": "org/Model-7B",
    "---\nbase_model: 'org/Model-7B'\nbase_model_relation: quantized\n---": "org/Model-7B",
    "base_model: org/Model-7B, said in the text only": None,
    "---\nlicense: mit\n---\nbase_model: org/Model-7B": None,
    "---\nbase_model: see https://x\n---\n": None,
}


@pytest.mark.parametrize(("card", "base"), CARDS.items())
def test_a_model_card_names_it(card, base, tmp_path):
    (tmp_path / "README.md").write_text(card)
    assert base_model(tmp_path) == base
    assert (base or "model card") in where_to_get(tmp_path)


NAMES = {
    "Model-7B-GPTQ": "Model-7B",
    "Model-7B-Instruct-AWQ": "Model-7B-Instruct",
    "Model-7B-bnb-4bit": "Model-7B",
    "Model-7B-unsloth-bnb-4bit": "Model-7B",
    "Model-7B-Instruct-FP8-dynamic": "Model-7B-Instruct",
    "Qwen-0.5B-GPTQ-Int4": "Qwen-0.5B",
    "Model.w8a8": "Model",
    "Model-7B": None,
    "gptq-made": None,
}


@pytest.mark.parametrize(("name", "base"), NAMES.items())
def test_else_its_name_does(name, base, tmp_path):
    (tmp_path / name).mkdir()
    assert base_model(tmp_path / name) == base
    cached = tmp_path / f"models--org--{name}" / "snapshots" / "0123abcd"
    cached.mkdir(parents=True)
    assert base_model(cached) == (base and f"org/{base}")


def test_or_the_name_in_its_config(tmp_path):
    assert base_model(tmp_path, "org/Model-7B") == "org/Model-7B"
    assert base_model(tmp_path, "org/Model-7B-AWQ") == "org/Model-7B"
    assert base_model(tmp_path, "/home/somebody/model") is None
    assert base_model(tmp_path, 7) is None


def test_a_card_that_is_no_text_is_passed_over(tmp_path):
    (tmp_path / "README.md").write_bytes(b"\xff\xfe\x00")
    assert base_model(tmp_path) is None
