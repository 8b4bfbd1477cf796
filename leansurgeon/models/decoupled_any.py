"""Any transformer of the library that derives head_dim from width // heads, with a free head_dim and number of heads.

This file stands alone: it travels inside checkpoints and needs only torch and transformers.

The library's own class is built with the heads that its width allows, and then every attention is widened: projections
get the rows and columns of the heads that the config names, and the numbers that the attention stores are updated.
`decoupled` in the config lists these modules and numbers, as found and proven for the class:

    {"model_type": "gptj", "class": "GPTJForCausalLM", "native": {"n_head": 16},
     "stages": [{"blocks": "h", "heads": "n_head", "kv_heads": null, "head_dim": "lean_head_dim",
                 "numbers": {"attn.num_attention_heads": "heads"},
                 "projections": {"attn.q_proj": "q", "attn.k_proj": "kv", "attn.v_proj": "kv", "attn.out_proj": "o"}}]}

For a model of several towers, `section` names the part of the config that holds these numbers. Tensor names and forward
pass are the library's.
"""

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto as auto

MODEL_TYPE = "leansurgeon_decoupled"


class LeanConfig(PretrainedConfig):
    """Reads a config of any model_type that holds `decoupled`; the result is a config of that type."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        spec = config_dict["decoupled"]
        section = spec.get("section")
        own = config_of(CONFIG_MAPPING[spec["model_type"]])
        place = config_dict[section] if section else config_dict
        native = {**place, **spec["native"]}
        native = {**config_dict, **({section: native} if section else native), "model_type": spec["model_type"]}
        found = super(own, own).from_dict(native, **kwargs)
        made = found[0] if isinstance(found, tuple) else found
        made.lean_numbers = {key: place[key] for key in spec["native"]}
        return found


def config_of(base):
    """Return the library's config class, extended to write the actual heads and the model_type of this file."""

    class Config(base):
        def to_dict(self):
            found = super().to_dict()
            if getattr(self, "decoupled", None):
                numbers, section = found.pop("lean_numbers", {}), self.decoupled.get("section")
                (found[section] if section else found).update(numbers)
                found["model_type"] = MODEL_TYPE
                lean = found.pop("lean_class", None)
                if lean and found.get("architectures"):
                    found["architectures"] = [lean]
            return found

        def to_diff_dict(self):
            return self.to_dict()

    Config.__name__ = Config.__qualname__ = "LeanConfig"
    return Config


class Numbers:
    """Heads of one stage and their sizes."""

    def __init__(self, stage, asked, head_dim):
        self.heads = asked[stage["heads"]]
        shared = stage["kv_heads"] or ""  # "=1": one key/value head for all, which no config key stores
        self.kv_heads = int(shared[1:]) if shared.startswith("=") else asked[shared] if shared else self.heads
        self.head_dim = head_dim
        self.groups = self.heads // self.kv_heads
        self.inner, self.kv_inner = self.heads * self.head_dim, self.kv_heads * self.head_dim

    def size(self, word):
        """Return the rows of a projection that consists of heads in this way."""
        sizes = {"q": self.inner, "kv": self.kv_inner, "heads*qkv": 3 * self.inner, "kv+kv": 2 * self.kv_inner}
        return (sizes | {"q+kv+kv": self.inner + 2 * self.kv_inner})[word]


def widen(model, config):
    """Give every attention of the built model the heads of the config."""
    section = config.decoupled.get("section")
    place = getattr(config, section) if section else config
    for stage in config.decoupled["stages"]:
        now = Numbers(stage, config.lean_numbers, getattr(place, stage["head_dim"]))
        for block in blocks_of(model, stage["blocks"]):
            widen_block(block, stage, now, lambda *place: replace(model, *place))


def widen_block(block, stage, now, replace):
    """Give the attentions of a block these heads; `replace` puts in a projection of another size."""
    for path, kind in stage["numbers"].items():
        owner, _, name = path.rpartition(".")
        if has(block, owner):
            setattr(block.get_submodule(owner), name, getattr(now, kind))
    for path, word in stage["projections"].items():
        if has(block, path):
            replace(block, path, word, now)


def blocks_of(model, path):
    prefix = getattr(model, "base_model_prefix", "")
    for whole in (path, f"{prefix}.{path}", path.removeprefix(f"{prefix}.")):
        if has(model, whole):
            return model.get_submodule(whole)
    raise ValueError(f"{type(model).__name__} has no blocks at '{path}'.")


def has(module, path):
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def replace(model, block, path, word, now):
    """Replace the projection at `path` by one of another size."""
    owner, _, name = path.rpartition(".")
    old = block.get_submodule(path)
    turned = type(old).__name__ == "Conv1D"  # stores the input axis first
    inputs, outputs = old.weight.shape if turned else old.weight.shape[::-1]
    inputs, outputs = (now.inner, outputs) if word == "o" else (inputs, now.size(word))
    like = {"device": old.weight.device, "dtype": old.weight.dtype}
    if turned:
        new = type(old)(outputs, inputs).to(**like)
    else:
        new = nn.Linear(inputs, outputs, bias=old.bias is not None, **like)
        if type(old) is not nn.Linear:
            new.__class__ = type(old)  # a Linear with the library's own forward pass
    setattr(block.get_submodule(owner), name, new)
    if not new.weight.is_meta:
        model._init_weights(new)


class Lean:
    """The class to call `from_pretrained` on; it makes models of the library's class with widened attention."""

    config_class = LeanConfig
    mapping = ""

    def __new__(cls, config, *args, **kwargs):
        return cls.made(config)(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, path, *args, config=None, **kwargs):
        if config is None:
            config = LeanConfig.from_pretrained(path)
        return cls.made(config).from_pretrained(path, *args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config, **kwargs):
        return cls.made(config)._from_config(config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        return None

    @classmethod
    def made(cls, config):
        """Return the library's class for this kind of head, with its attention widened."""
        spec = config.decoupled
        names = getattr(auto, cls.mapping)
        found = names.get(spec["model_type"])
        found = [found] if isinstance(found, str) else list(found or ())
        name = spec["class"] if spec["class"] in found or not found else found[0]
        base = getattr(transformers, name)

        def __init__(self, config, *args, **kwargs):
            config.lean_class = cls.__name__  # written to files as the class name
            base.__init__(self, config, *args, **kwargs)
            widen(self, config)

        # transformers decides by the class name whether it converts tensor names in files; keep that conversion.
        own = {"__init__": __init__, "config_class": type(config), "is_custom_code": classmethod(lambda cls: False)}
        return type(base.__name__, (base,), own)


class LeanModel(Lean):
    mapping = "MODEL_MAPPING_NAMES"


class LeanForCausalLM(Lean):
    mapping = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


class LeanForMaskedLM(Lean):
    mapping = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"


class LeanForSequenceClassification(Lean):
    mapping = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"


class LeanForTokenClassification(Lean):
    mapping = "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"


class LeanForQuestionAnswering(Lean):
    mapping = "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"


class LeanForSeq2SeqLM(Lean):
    mapping = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"


class LeanForSpeechSeq2Seq(Lean):
    mapping = "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"


class LeanForImageTextToText(Lean):
    mapping = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"


class LeanForImageClassification(Lean):
    mapping = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"


class LeanForCTC(Lean):
    mapping = "MODEL_FOR_CTC_MAPPING_NAMES"


class LeanForAudioClassification(Lean):
    mapping = "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"


AUTO_MAP = {
    "AutoConfig": "LeanConfig",
    "AutoModel": "LeanModel",
    "AutoModelForCausalLM": "LeanForCausalLM",
    "AutoModelForMaskedLM": "LeanForMaskedLM",
    "AutoModelForSequenceClassification": "LeanForSequenceClassification",
    "AutoModelForTokenClassification": "LeanForTokenClassification",
    "AutoModelForQuestionAnswering": "LeanForQuestionAnswering",
    "AutoModelForSeq2SeqLM": "LeanForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq": "LeanForSpeechSeq2Seq",
    "AutoModelForImageTextToText": "LeanForImageTextToText",
    "AutoModelForImageClassification": "LeanForImageClassification",
    "AutoModelForCTC": "LeanForCTC",
    "AutoModelForAudioClassification": "LeanForAudioClassification",
}
