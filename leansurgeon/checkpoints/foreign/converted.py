"""Convert checkpoints that are not config.json and safetensors into a temporary folder: pickles, and Crammed BERT.

The latter is the published layout of `JonasGeiping/crammed-bert`. Imports torch for pickles only.

Facts from github.com/JonasGeiping/cramming (`architectures/attention.py`, `components.py`, `crammed_bert.py`):

* `query_key_value.weight` `(3 * inner, width)` is fused *per head*: rows are head 0's q, k, v, then head 1's q, k, v,
  and so on;
* `ffn.dense_in.weight` `(2 * mlp, width)`: the upper half is the value of the gated unit, the lower half goes through
  GELU;
* `decoder.weight` is the word embedding (the file may keep either name);
* `norm_factor` is a buffer, 1 / sqrt(head_dim), and `pe` a table of sinusoids; neither is a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from leansurgeon.architectures.base import Config
from leansurgeon.checkpoints.foreign import companions, unpacked
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.weights import Arrays, TensorOut, Weights, write
from leansurgeon.errors import UnsupportedModel, plural
from leansurgeon.reading.jsonfile import Json, value_at

Moves: TypeAlias = dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]  # our name -> (their name, transform)

FUSED = "encoder.layers.{i}.attn.self_attention.query_key_value.weight"
EMBEDDING = ("encoder.embedding.word_embedding.weight", "decoder.weight")
BUFFERS = ("norm_factor", "embedding.pos_embedding.pe")

# Settings that our module supports; the published code has many more. Key in `arch`, required value, value if the key
# is missing.
EXPECTED = (
    ("norm", "LayerNorm", "LayerNorm"),
    ("norm_scheme", "pre", "pre"),
    ("nonlin", "GELUglu", None),
    ("tie_weights", True, True),
    ("decoder_bias", False, False),
    ("skip_head_transform", True, True),
    ("use_bias", False, False),
    ("final_norm", True, True),
    ("ffn_layer_frequency", 1, 1),
    ("embedding.pos_embedding", "scaled-sinusoidal", None),
    ("embedding.normalization", True, True),
    ("attention.type", "self-attention", None),
    ("attention.causal_attention", False, False),
    ("attention.qkv_bias", False, False),
    ("attention.rotary_embedding", False, False),
    ("attention.skip_output_projection", False, False),
    ("attention.sequence_op", "torch-softmax", "torch-softmax"),
)


def from_pickle(path: Path, allow_pickle: bool, keep: ExitStack) -> tuple[Path, tuple[Path, ...]]:
    """Read the pickles of a folder with `weights_only=True` into a temporary safetensors copy.

    Returns the copy and the pickles. Raises `UnsupportedModel` if there are none or `allow_pickle` is not set.
    """
    pickles = sorted([*path.glob("pytorch_model*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if not pickles:
        raise UnsupportedModel(
            f"There is no model.safetensors in {path}.", "A folder needs config.json and safetensors weights."
        )
    if not allow_pickle:
        raise UnsupportedModel(
            f"{pickles[0].name} is a pickle, and reading a pickle can run foreign code.",
            "If you trust it, shrink, plan and inspect read it with --allow-pickle (weights_only=True). For other "
            f"commands save it anew:\n{unpacked.saving(path)}",
        )
    from leansurgeon.reading.pickles import read_tensors

    tensors = {name: tensor for file in pickles for name, tensor in read_tensors(file).items()}
    if not tensors:
        raise UnsupportedModel(f"{pickles[0].name} holds no tensors.")
    from safetensors.torch import save_file

    copy = keep.enter_context(scratch())
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    companions.copy(path, copy, also=("config.json", "README.md"))
    return copy, tuple(pickles)


def from_crammed_bert(config: Config, weights: Weights, keep: ExitStack) -> Path:
    """Convert the published Crammed BERT into a temporary folder that lives as long as `keep`."""
    new_config, arrays = convert_crammed_bert(config, weights.float32, list(weights.entries))
    folder = keep.enter_context(scratch())
    write(folder, [TensorOut(name, "F32", a.shape, make=lambda a=a: a.astype("<f4")) for name, a in arrays.items()])
    (folder / "config.json").write_text(json.dumps(new_config, indent=2))
    return folder


# -- the published layout of Crammed BERT --------------------------------------------------------------------------


def is_crammed_bert(config: Config, names: Iterable[str]) -> bool:
    """Return whether a checkpoint has the published layout."""
    return config.get("model_type") == "crammedBERT" or FUSED.format(i=0) in set(names)


def convert_crammed_bert(
    config: Config, read: Callable[[str], np.ndarray], names: Iterable[str]
) -> tuple[Config, Arrays]:
    """Return our config and our tensors for a published checkpoint.

    `read(name)` returns a tensor of the published file as float32. Raises `UnsupportedModel` if the checkpoint is not
    the Crammed BERT of the paper (another activation, rotary positions, biases, ...) or if tensors are missing or left
    over.
    """
    names, arch = set(names), config.get("arch") or {}
    for path, wanted, absent in EXPECTED:
        if (value := lookup(arch, path, absent)) != wanted:
            raise UnsupportedModel(
                f"This Crammed BERT checkpoint has arch.{path} = {value!r}, and only {wanted!r} can be converted.",
                "That is what arch=crammed-bert and the published checkpoint hold.",
            )
    layers, heads, width = (
        number(arch, key) for key in ("num_transformer_layers", "attention.num_attention_heads", "hidden_size")
    )
    plan = tensor_plan(names, layers, heads)
    used = {source for source, _ in plan.values()} | set(EMBEDDING)
    left = sorted(n for n in names - used if not n.endswith(BUFFERS))
    missing = sorted(source for source, _ in plan.values() if source not in names)
    if missing or left:
        deep = plural(layers, "layer")
        what = f"lacks '{missing[0]}'" if missing else f"holds '{left[0]}', which has no place in {deep}"
        raise UnsupportedModel(
            f"This Crammed BERT checkpoint {what}.", "Do config.json and the weights belong together?"
        )
    classifier = "pooler.weight" in plan
    vocab = lookup(arch, "embedding.vocab_size") or read(plan["encoder.embeddings.word_embeddings.weight"][0]).shape[0]
    dropout = lookup(arch, "hidden_dropout_prob", 0.1)
    new = {
        "architectures": ["CrammedBertForSequenceClassification" if classifier else "CrammedBertForMaskedLM"],
        "model_type": "crammed_bert",
        "vocab_size": int(vocab),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": number(arch, "intermed_size") // 2,
        "max_position_embeddings": int(lookup(arch, "embedding.max_seq_length", 128)),
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": lookup(arch, "attention.dropout_prob", 0.1),
        "classifier_hidden_size": int(lookup(arch, "classification_head.head_dim", 1024)),
        "classifier_dropout": lookup(arch, "classification_head.classifier_dropout", dropout),
        "initializer_range": lookup(arch, "init.std", 0.02),
        "layer_norm_eps": float(lookup(arch, "norm_eps", 1e-12)),
        "pad_token_id": lookup(arch, "embedding.pad_token_id", 0),
        "tie_word_embeddings": True,
    }
    if classifier and "id2label" in config:
        new |= {key: config[key] for key in ("id2label", "label2id") if key in config}
    elif classifier:
        count = int(lookup(arch, "num_labels") or read("head.weight").shape[0])
        names = [f"LABEL_{i}" for i in range(count)]
        new |= {"id2label": {str(i): name for i, name in enumerate(names)}}
        new |= {"label2id": {name: i for i, name in enumerate(names)}}
    return new, {name: np.ascontiguousarray(change(read(source))) for name, (source, change) in plan.items()}


def tensor_plan(names: set[str], layers: int, heads: int) -> Moves:
    """Map our tensor names to the published name and the transform."""
    embedding = next((n for n in EMBEDDING if n in names), EMBEDDING[0])
    plan = {
        "encoder.embeddings.word_embeddings.weight": (embedding, same),
        "encoder.embeddings.position_scale": ("encoder.embedding.pos_embedding.scale_factor", same),
    }
    plan |= norm("encoder.embeddings.norm", "encoder.embedding.norm")
    for i in range(layers):
        ours, theirs = f"encoder.layers.{i}.", f"encoder.layers.{i}."
        plan |= norm(ours + "attention_norm", theirs + "norm1") | norm(ours + "mlp_norm", theirs + "norm2")
        for part, letter in enumerate(("query", "key", "value")):
            # Select the rows of q, k or v from `(heads * 3 * head_dim, width)`, ordered by head.
            plan[f"{ours}attention.{letter}.weight"] = (
                FUSED.format(i=i),
                lambda w, part=part: w.reshape(heads, 3, -1, w.shape[1])[:, part].reshape(-1, w.shape[1]),
            )
        plan[ours + "attention.output.weight"] = (theirs + "attn.dense.weight", same)
        plan[ours + "mlp.up.weight"] = (theirs + "ffn.dense_in.weight", lambda w: np.split(w, 2)[0])
        plan[ours + "mlp.gate.weight"] = (theirs + "ffn.dense_in.weight", lambda w: np.split(w, 2)[1])
        plan[ours + "mlp.down.weight"] = (theirs + "ffn.dense_out.weight", same)
    plan |= norm("encoder.final_norm", "encoder.final_norm")
    if "head.weight" in names:
        for ours, theirs in (("pooler", "pooler.dense"), ("classifier", "head")):
            plan |= norm(ours, theirs)
    return plan


def same(array: np.ndarray) -> np.ndarray:
    """Return the array unchanged."""
    return array


def norm(ours: str, theirs: str) -> Moves:
    """Map a weight and a bias that keep their layout."""
    return {f"{ours}.{kind}": (f"{theirs}.{kind}", same) for kind in ("weight", "bias")}


def lookup(arch: Config, path: str, default: Json = None) -> Any:
    """Return the value at a dotted path of the nested config, or `default` if it is missing or None."""
    value = value_at(arch, *path.split("."))
    return default if value is None else value


def number(arch: Config, path: str) -> int:
    """Return a positive integer of the config. Raises `UnsupportedModel` for anything else."""
    value = lookup(arch, path)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"The config says arch.{path} = {value!r}, which is not a positive whole number.")
    return value
