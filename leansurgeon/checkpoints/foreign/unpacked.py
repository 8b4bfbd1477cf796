"""Errors for weights that are no model folder, with the lines of Python that make one of them."""

from __future__ import annotations

from math import prod
from pathlib import Path

from leansurgeon.errors import LeanSurgeonError, UnsupportedModel
from leansurgeon.reading import jsonfile
from leansurgeon.reading.tensorfile import read_header

ADAPTER = "adapter_config.json"
ADAPTED = {  # peft's name of a task -> the end of the class name for it
    "SEQ_CLS": "SequenceClassification",
    "SEQ_2_SEQ_LM": "Seq2SeqLM",
    "TOKEN_CLS": "TokenClassification",
    "QUESTION_ANS": "QuestionAnswering",
    "FEATURE_EXTRACTION": "FeatureExtraction",
}
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
NEEDED = "A source needs config.json and safetensors weights."
OTHERS = {
    ".gguf": (
        "a GGUF file: quantised weights for llama.cpp",
        "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=..)",
    ),
    ".onnx": ("an ONNX graph, which holds no weights of a known class", ""),
    ".h5": ("Keras or TensorFlow weights", "AutoModel.from_pretrained(FOLDER, from_tf=True)"),
    ".msgpack": ("Flax weights", "AutoModel.from_pretrained(FOLDER, from_flax=True)"),
}


def of_file(path: Path) -> UnsupportedModel:
    """Return the error for a single file that was given as a model."""
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return UnsupportedModel(
            f"{path} is a bare state dict ({describe_counts(path)}): weights without a config.", lines(path)
        )
    if suffix in PICKLES:
        return UnsupportedModel(
            f"{path} is a pickle, a state dict or a whole object, which says neither class nor shape of the model.",
            lines(path),
        )
    if suffix in OTHERS:
        what, how = OTHERS[suffix]
        return UnsupportedModel(
            f"{path} is {what}.", f"Where transformers reads it: {how}.save_pretrained(FOLDER)." if how else None
        )
    return UnsupportedModel(f"{path} is a file; a model is a folder.", NEEDED)


def of_folder(path: Path) -> UnsupportedModel:
    """Return the error for a folder without config.json."""
    if (path / ADAPTER).is_file():
        return UnsupportedModel(f"{path} holds an adapter, which is a part of a model.", merging(path))
    weights = sorted(file for file in path.glob("*") if file.suffix.lower() in (".safetensors", *PICKLES))
    if weights:
        what = f"holds weights ({weights[0].name}) and no config.json, which says class and shape of the model"
        return UnsupportedModel(f"{path} {what}.", lines(weights[0]))
    below = sorted(file.parent for file in path.glob("*/config.json"))
    hint = f"There is one in {below[0]}: name that." if below else NEEDED
    return UnsupportedModel(f"{path} has no config.json, so it is no model folder.", hint)


def lines(weights: Path) -> str:
    """Return the Python code that turns a state dict into a model folder, for the user to complete."""
    safe = weights.suffix.lower() == ".safetensors"
    read = f'load_file("{weights}")' if safe else f'torch.load("{weights}", weights_only=True)'
    load = "from safetensors.torch import load_file" if safe else "import torch"
    return "\n".join(
        (
            "These lines make a folder of it; NAME is the model that it was trained from, with the class that it has:",
            f"    {load}",
            "    from transformers import AutoConfig, AutoModelForCausalLM",
            '    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("NAME"))',
            f"    model.load_state_dict({read})",
            '    model.save_pretrained("FOLDER")',
        )
    )


def saving(folder: Path) -> str:
    """Return the Python code that saves a transformers folder again with safetensors weights."""
    named = (jsonfile.read_object_if_whole(folder / "config.json") or {}).get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else "AutoModel"
    return f'    from transformers import {name}\n    {name}.from_pretrained("{folder}").save_pretrained("FOLDER")'


def merging(folder: Path) -> str:
    """Return the Python code that merges an adapter into a whole model."""
    task = (jsonfile.read_object_if_whole(folder / ADAPTER) or {}).get("task_type")
    name = f"AutoPeftModelFor{ADAPTED.get(str(task), 'CausalLM')}"
    return "\n".join(
        (
            "These lines merge it into the weights that it was trained on:",
            f"    from peft import {name}",
            f'    {name}.from_pretrained("{folder}").merge_and_unload().save_pretrained("FOLDER")',
        )
    )


def describe_counts(path: Path) -> str:
    """Describe the contents of a file: `201 tensors, 22,713,216 numbers`."""
    try:
        entries = read_header(path).values()
    except LeanSurgeonError:
        return "damaged"
    numbers = sum(prod(entry.shape) for entry in entries)
    return f"{len(entries):,} tensors, {numbers:,} numbers"
