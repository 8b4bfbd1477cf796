"""Tiny models of every Hugging Face family, built from configs; nothing here needs a network."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; threads of one would wait for those of others
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("LEANSURGEON_CACHE", os.path.join(tempfile.gettempdir(), f"leansurgeon-tests-{os.getuid()}"))

MEMORY, ROOM = "/dev/shm", 8 << 30
PLACE = pytest.StashKey[str]()


def ordinary(config: pytest.Config) -> bool:
    """Whether tests run that neither measure disks and processes nor have a machine of their own."""
    return "not benchmark" in config.option.markexpr


def pytest_configure(config: pytest.Config) -> None:
    """Thousands of tiny models and folders come and go: threads that load them and looks for rings of dead objects cost
    more than they save, and folders are in memory where it has room.
    """
    if not ordinary(config):
        return
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    gc.set_threshold(100_000, 50, 1000)
    if "TMPDIR" not in os.environ and room_in_memory():
        config.stash[PLACE] = tempfile.mkdtemp(prefix="leansurgeon-tests-", dir=MEMORY)
        os.environ["TMPDIR"] = tempfile.tempdir = config.stash[PLACE]


def room_in_memory() -> bool:
    """Whether folders may be in memory: there is much of it, and what is compiled there may run."""
    if not os.access(MEMORY, os.W_OK) or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        return False
    import psutil

    return min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) > ROOM


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What failed can be looked at; else nothing stays in memory."""
    if exitstatus:
        session.config.stash.setdefault(PLACE, "")
        del session.config.stash[PLACE]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto` one more than there are cores, since many tests wait for processes that they have started."""
    from leansurgeon.rank import cores

    return int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", cores() + 1))


# Files whose tests take longest: begun last, they would keep one process busy while the others have nothing left.
LONGEST = ("test_malformed.py", "test_experiment.py", "test_end_to_end.py", "test_examples.py")


# Of a test that goes through more families than these, a commit runs these; `-m families` runs the others.
EVERY_COMMIT = {"bert", "gpt2", "llama", "qwen3", "t5", "vit", "timm_xcit", "timm_swin"}
INFERRED = 2  # of a test that goes through more types without a declaration, a commit runs the first so many


def family_of(item: pytest.Item) -> str | None:
    """The family that a test is about, by the values of its parameters."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    known = (value for value in values if isinstance(value, str) and (value in FAMILIES or value.startswith("timm_")))
    return next(known, None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    of_test: dict[str, set[str]] = {}
    for item in items:
        if family := family_of(item):
            of_test.setdefault(item.nodeid.split("[")[0], set()).add(family)
    for item in items:
        family, all_of_test = family_of(item), of_test.get(item.nodeid.split("[")[0], set())
        if family not in EVERY_COMMIT and len(all_of_test) > len(EVERY_COMMIT):
            item.add_marker("families")
    seen: Counter[str] = Counter()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent.name == "infer" and {"name", "model_type"} & params.keys():
            test = item.nodeid.split("[")[0]
            seen[test] += 1
            if seen[test] > INFERRED:
                item.add_marker("families")


def settle() -> None:
    """What is there now (torch and transformers, thousands of tests) stays: looking through all of it takes half a
    second, and every training ends with a look.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        settle()  # what the file has imported


@pytest.hookimpl
def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # libraries want their objects taken apart before the end
    if place := config.stash.get(PLACE, ""):
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk(request):
    """No test survives a loss of power, so none waits for the disk; who asks what is brought there looks at the calls.
    Programs that tests start wait for it, forks of the tests' process do not.
    """
    with pytest.MonkeyPatch.context() as patch:
        if ordinary(request.config):
            patch.setattr(os, "fsync", lambda handle: os.fstat(handle) and None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _forked_proofs():
    """What proves a result is a fork of a process with torch imported, and not each time a new one."""
    from tests.support.processes.proofs import forked

    with forked():
        yield


ENCODER = dict(num_hidden_layers=4, num_attention_heads=4, hidden_size=32, intermediate_size=48)
DECODER = ENCODER | dict(num_key_value_heads=2, head_dim=16, vocab_size=61, max_position_embeddings=64)
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
IMAGE = dict(image_size=8, patch_size=2, num_channels=1)
VISION = ENCODER | IMAGE | dict(head_dim=8, num_labels=10)
TEXT = ENCODER | dict(vocab_size=61, max_position_embeddings=40)
DINO = dict(num_hidden_layers=4, num_attention_heads=4, hidden_size=32, mlp_ratio=2, head_dim=8, num_labels=10)
T5 = dict(num_layers=4, num_heads=4, d_model=32, d_kv=8, d_ff=48, vocab_size=61, initializer_factor=1.5)
BART = dict(d_model=32, vocab_size=61, max_position_embeddings=40, init_std=0.3) | {
    f"{side}_{key}": number
    for side in ("encoder", "decoder")
    for key, number in (("layers", 4), ("attention_heads", 4), ("ffn_dim", 48))
}

# family -> (config class, model class, config)
FAMILIES = {
    "bert": ("BertConfig", "BertForMaskedLM", ENCODER | dict(vocab_size=61, max_position_embeddings=40)),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", ENCODER | dict(vocab_size=61, max_position_embeddings=40)),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(n_layer=4, n_head=4, n_embd=32, vocab_size=61, n_positions=40)),
    "vit": ("ViTConfig", "ViTForImageClassification", VISION),
    "deit": ("DeiTConfig", "DeiTForImageClassification", VISION),
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER | SPECIAL | dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("MistralConfig", "MistralForCausalLM", DECODER | SPECIAL),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DECODER | SPECIAL),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DECODER | SPECIAL),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", DECODER | SPECIAL),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", DECODER | SPECIAL),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        DECODER | SPECIAL | dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", DECODER | SPECIAL | dict(attention_bias=True)),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", DECODER | SPECIAL),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForMaskedLM", TEXT),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", TEXT | dict(embedding_size=16)),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        dict(n_layers=4, n_heads=4, dim=32, hidden_dim=48, vocab_size=61, max_position_embeddings=40),
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        TEXT | SPECIAL | dict(cls_token_id=1, sep_token_id=2, local_attention=4, norm_bias=True),
    ),
    "nystromformer": (
        "NystromformerConfig",
        "NystromformerForMaskedLM",
        TEXT | dict(num_landmarks=4, segment_means_seq_len=12, conv_kernel_size=5),
    ),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", DINO | IMAGE),
    "dinov2_with_registers": (
        "Dinov2WithRegistersConfig",
        "Dinov2WithRegistersForImageClassification",
        DINO | IMAGE | dict(num_register_tokens=3),
    ),
    "dinov3_vit": (
        "DINOv3ViTConfig",
        "DINOv3ViTModel",
        ENCODER | IMAGE | dict(num_register_tokens=2, use_gated_mlp=True),
    ),
    "clip_vision_model": ("CLIPVisionConfig", "CLIPVisionModel", ENCODER | IMAGE),
    "siglip_vision_model": ("SiglipVisionConfig", "SiglipVisionModel", ENCODER | IMAGE),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        dict(num_hidden_layers=4, num_attention_heads=4, hidden_size=32, ffn_dim=48, word_embed_proj_dim=16)
        | dict(vocab_size=61, max_position_embeddings=40, init_std=0.3),
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", T5 | dict(feed_forward_proj="gated-gelu")),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", BART),
}
NARROW_MLP = {"dinov2": 32, "dinov2_with_registers": 32}  # whole multiples of the width only; others take 24
DECLARED = {"xlm-roberta": "roberta"}  # families that another one's declaration serves


def architecture(family: str):
    """The declaration of a family of `FAMILIES`."""
    from leansurgeon import architectures

    return architectures.load_families()[DECLARED.get(family, family)]


# Families whose number of heads has to stay, and why.
FIXED = {"olmo2": "over all heads"}
# Families in which heads can keep their size, by the library's own config or by a modelling file of ours.
KEEP = [f for f in FAMILIES if f not in FIXED and (architecture(f).stores_head_dim or architecture(f).decoupled)]
SPLIT_ONLY = [f for f in FAMILIES if f not in KEEP and f not in FIXED]
RANDOM = 0.3  # large enough that attention is far from uniform, so a wrong head shows in the output


def build(family: str, seed: int = 0, **changes):
    """A tiny random model of a family with non-trivial norms and biases."""
    import torch
    import transformers

    config_class, model_class, config = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**(config | dict(initializer_range=RANDOM) | changes))
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def example(model):
    """A fixed input that the model accepts."""
    import torch

    generator = torch.Generator().manual_seed(7)
    if model.main_input_name == "pixel_values":
        c = model.config
        return {"pixel_values": torch.randn(3, c.num_channels, c.image_size, c.image_size, generator=generator)}
    ids = torch.randint(3, model.config.vocab_size, (3, 12), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, model.config.vocab_size, (3, 9), generator=generator)
    return inputs


def output(model, inputs):
    """What the model says: logits, or the pooled output of a tower without a head."""
    found = model(**inputs)
    return found.logits if "logits" in found else found.pooler_output


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """Where sources lie is noted by their digests, and another process may make the same tiny model meanwhile."""
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def saved(tmp_path):
    """Builds a tiny model and saves it the library's way; returns (folder, model)."""

    def make(family: str, **changes):
        model = build(family, **changes)
        folder = tmp_path / f"source-{family}"
        model.save_pretrained(folder)
        return folder, model

    return make
