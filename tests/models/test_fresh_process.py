"""Folders with a modelling file load in a process that has no leansurgeon, and give the same bits."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leansurgeon.checkpoints.family import auto_map

TINY = dict(vocab_size=40, hidden_size=20, num_hidden_layers=2, num_attention_heads=3, intermediate_size=24)
TINY |= dict(max_position_embeddings=24, head_dim=7)
GPT2 = dict(vocab_size=40, n_embd=20, n_layer=2, n_head=3, n_inner=24, n_positions=24, head_dim=7)
GPT2 |= dict(bos_token_id=0, eos_token_id=1)
BART = dict(vocab_size=40, d_model=20, encoder_layers=2, decoder_layers=1, encoder_ffn_dim=24, decoder_ffn_dim=24)
BART |= dict(encoder_attention_heads=3, encoder_head_dim=7, decoder_attention_heads=2, decoder_head_dim=5)
# The file, with the family where it holds several; the class that is loaded; the config.
CASES = [
    ("crammed_bert", "AutoModelForMaskedLM", TINY),
    ("tinystories_gpt", "AutoModelForCausalLM", TINY),
    ("nystromformer_lra", "AutoModelForSequenceClassification", TINY | {"num_landmarks": 6, "conv_kernel_size": 5}),
    ("decoupled_bert/bert", "AutoModelForMaskedLM", TINY),
    ("decoupled_bert/roberta", "AutoModelForSequenceClassification", TINY | {"num_labels": 3}),
    ("decoupled_gpt2", "AutoModelForCausalLM", GPT2),
    ("decoupled_bart/bart", "AutoModelForSeq2SeqLM", BART | {"max_position_embeddings": 24}),
    ("decoupled_bart/mbart", "AutoModelForSeq2SeqLM", BART | {"max_position_embeddings": 24}),
]
NAMES = [f"{file}-{auto}" for file, auto, _ in CASES]
ALONE = """
import importlib.abc, json, sys
class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "leansurgeon":
            raise ImportError("leansurgeon is not here")
sys.meta_path.insert(0, Wall())
import torch, transformers
for folder, auto in json.loads(sys.argv[1]):
    cls = getattr(transformers, auto)
    model, info = cls.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        logits = model.eval()(torch.load(folder + "/ids.pt")).logits
    torch.save(logits, folder + "/logits.pt")
    assert "auto_map" in transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True).to_dict()
assert "leansurgeon" not in sys.modules
"""


def make(file, auto, numbers):
    """A random model of one of our files, the file, and what it says of its classes."""
    stem, _, family = file.partition("/")
    module = importlib.import_module(f"leansurgeon.models.{stem}")
    names = auto_map(f"{stem}.py", f"leansurgeon_{family}")
    config, model = (getattr(module, names[key].removeprefix(f"{stem}.")) for key in ("AutoConfig", auto))
    model = model(config(**numbers)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model, module.__file__, names


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_gradients_reach_every_parameter(case):
    model, *_ = make(*case)
    ids = torch.randint(2, 40, (3, 11))
    model(ids, labels=torch.tensor([0, 1, 1]) if "Sequence" in case[1] else ids).loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Saves every case, loads all of them in one fresh process, and gives (expected, found) logits by case."""
    root = tmp_path_factory.mktemp("alone")
    torch.manual_seed(0)
    expected, jobs = [], []
    for index, case in enumerate(CASES):
        model, file, names = make(*case)
        ids, folder = torch.randint(2, 40, (2, 11)), root / str(index)
        with torch.no_grad():
            expected.append(model(ids).logits)
        model.save_pretrained(folder)
        shutil.copy(file, folder)
        torch.save(ids, folder / "ids.pt")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
        jobs.append((str(folder), case[1]))
    env = {
        "HF_MODULES_CACHE": str(root / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums of as many parts give the same bits
    }
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, json.dumps(jobs)], env=env, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [(e, torch.load(Path(folder) / "logits.pt")) for e, (folder, _) in zip(expected, jobs, strict=True)]


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_a_fresh_process_without_leansurgeon_gives_the_same_bits(reloaded, index):
    expected, found = reloaded[index]
    assert expected.std() > 0.01
    assert torch.equal(expected, found)


@pytest.mark.parametrize("stem", sorted({file.partition("/")[0] for file, _, _ in CASES}))
def test_modelling_files_import_nothing_but_torch_and_transformers(stem):
    module = importlib.import_module(f"leansurgeon.models.{stem}")
    found = re.findall(r"^\s*(?:import|from) (\w+)", Path(module.__file__).read_text(), re.M)
    assert set(found) <= {"torch", "transformers", "math", "copy"}
