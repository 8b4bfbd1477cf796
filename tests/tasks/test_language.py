"""Causal and masked language modelling: windows, masks, scores (against transformers' own losses), tokenizers, bad
input.
"""

from __future__ import annotations

import json
import math
import re
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from scipy import stats
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from leansurgeon import tasks
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.tasks import user_data
from leansurgeon.tasks.text import corpus, vocab
from leansurgeon.tasks.text import files as text_files
from leansurgeon.training.recipe.reading import load
from tests.support.models.word_models import crammed_words
from tests.tasks.prepared import everything, prepare


def prepared(cache, name="causal-lm", **options):
    return prepare(cache, name, **{"tokenizer": "char", "seq_len": 64} | options)


TEXT = text_files.PACKAGED["austen"].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_the_windows_together_are_the_text(cache, kind):
    task = prepared(cache, tokenizer=kind, random_windows=False, eval_fraction=0.1)
    whole = dict(zip(("train", "eval"), text_files.cut_end(TEXT, 0.1), strict=True))
    for split, text in whole.items():
        ids = everything(task, split)["input_ids"]
        part = task.tokenizer().decode(ids.flatten(), skip_special_tokens=True)
        assert text.startswith(part) and len(text) - len(part) < 64 * 8
    assert task.model_overrides() == {"vocab_size": len(task.tokenizer())}


def test_training_windows_start_elsewhere_in_each_epoch_and_follow_from_seed_and_epoch(cache):
    task = prepared(cache)
    tokens = task._array("train")
    starts = set()
    for epoch in range(8):
        ids = task.batch("train", np.arange(task.size("train")), seed=0, epoch=epoch)["input_ids"]
        flat = ids.flatten().numpy()
        (start,) = [o for o in range(64) if np.array_equal(tokens[o : o + len(flat)], flat)]
        starts.add(start)
    assert len(starts) > 4
    assert torch.equal(task.batch("train", np.array([7, 3]), seed=0, epoch=7)["input_ids"], ids[[7, 3]])
    ends = [task.batch("eval", np.arange(5), seed=s, epoch=e)["input_ids"] for s, e in ((0, 0), (1, 4))]
    assert torch.equal(*ends)
    with pytest.raises(IndexError):
        task.batch("eval", np.array([task.size("eval")]), seed=0, epoch=0)


def test_causal_score_is_the_loss_of_transformers(cache):
    task = prepared(cache)
    batch = task.batch("train", np.arange(3), seed=0, epoch=0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, **task.model_overrides())).eval()
    batch["labels"][1] = -100  # a sample that fills up the batch
    rest = batch["input_ids"][[0, 2]]
    with torch.no_grad():
        score = task.score(model(input_ids=batch["input_ids"]).logits, batch)
        loss = float(model(input_ids=rest, labels=rest).loss)
    assert score.loss_count == 2 * 63
    assert float(score.loss_sum / score.loss_count) == pytest.approx(loss, rel=1e-5)
    assert task.metric_value(tasks.Sums(*map(float, score[:4])))["perplexity"] == pytest.approx(math.exp(loss))
    assert task.metric_value(tasks.Sums(1e9, 1, 1e9, 1)) == {"perplexity": math.inf}


def test_masked_score_is_the_loss_of_transformers(cache):
    task = prepared(cache, "masked-lm", tokenizer="wordpiece", vocab_size=500)
    batch = task.batch("eval", np.arange(4), seed=0, epoch=0)
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    with torch.no_grad():
        out = BertForMaskedLM(BertConfig(**sizes, **task.model_overrides())).eval()(**batch)
    score = task.score(out.logits, batch)
    assert float(score.loss_sum / score.loss_count) == pytest.approx(float(out.loss), rel=1e-5)
    assert score.loss_count == (batch["labels"] != -100).sum()


def test_masks_hide_the_share_asked_for_as_bert_does(cache):
    task = prepared(cache, "masked-lm", tokenizer="wordpiece", mask_prob=0.4)
    plain = prepared(cache, "causal-lm", tokenizer="wordpiece")
    rows = np.arange(task.size("train"))
    batch = task.batch("train", rows, seed=0, epoch=0)
    tokens = plain.batch("train", rows, seed=0, epoch=0)["input_ids"]
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], tokens[chosen])
    assert torch.equal(batch["input_ids"][~chosen], tokens[~chosen])
    number, mask_id, size = int(chosen.sum()), task.tokenizer().mask_token_id, len(task.tokenizer())
    assert stats.binomtest(number, chosen.numel(), 0.4).pvalue > 1e-3

    hidden = batch["input_ids"][chosen] == mask_id
    same = batch["input_ids"][chosen] == tokens[chosen]
    assert stats.binomtest(int(hidden.sum()), number, 0.8 + 0.1 / size).pvalue > 1e-3
    assert stats.binomtest(int(same.sum()), number, 0.1 + 0.1 / size).pvalue > 1e-3
    others = batch["input_ids"][chosen][~hidden & ~same].numpy()
    assert stats.kstest(others / size, "uniform").pvalue > 1e-3
    # Where in the window a token stands makes no difference.
    assert stats.chisquare(chosen.sum(0)).pvalue > 1e-3


def test_the_ends_of_documents_are_never_hidden(tmp_path):
    for i in range(50):
        (tmp_path / f"{i:03}.txt").write_text("ab\ncd\n" * 3 + f"cd {i}\n")
    task = prepared(tmp_path / "cache", "masked-lm", data=str(tmp_path / "*.txt"), mask_prob=0.9, seq_len=32)
    batch = everything(task, "train")
    ends = task.tokenizer().eos_token_id
    assert (batch["input_ids"] == ends).sum() > 20 and not (batch["labels"] == ends).any()


def test_the_models_own_tokenizer(tmp_path, cache):
    model = tmp_path / "model"
    made = vocab.make("bpe", 600, [TEXT])
    made.save_pretrained(model)
    task = prepared(cache, tokenizer="model", model_dir=model)
    assert task.model_overrides() == {} and len(task.tokenizer()) == 600
    ids = task.batch("eval", np.arange(1), seed=0, epoch=0)["input_ids"][0]
    assert task.tokenizer().decode(ids) in TEXT
    vocab.make("bpe", 700, [TEXT]).save_pretrained(model)  # another tokenizer in the same place
    assert len(prepared(cache, tokenizer="model", model_dir=model).tokenizer()) == 700


def test_held_out_files_and_several_documents(tmp_path):
    for name, text in (("a", "aaaa\n"), ("b", "bbbb\n"), ("c", "cabc\n"), ("d", "dddd\n")):
        (tmp_path / f"{name}.txt").write_text(text * 40)
    files = [str(tmp_path / "[ab].txt"), str(tmp_path / "a.txt")]  # a file named twice counts once
    held = {"eval_data": str(tmp_path / "c.txt"), "test_data": str(tmp_path / "d.txt")}
    task = prepared(tmp_path / "cache", data=files, **held, seq_len=8)
    said = task.describe()
    assert said["characters"] == {"train": 400, "eval": 200, "test": 200} and said["train_tokens"] == 402
    # The vocabulary comes from the training text: "c" is unknown.
    ids = task.batch("eval", np.arange(25), seed=0, epoch=0)["input_ids"]
    assert (ids == task.tokenizer().unk_token_id).sum() == 80


def test_rows_of_the_embedding_can_be_rounded_up(cache):
    assert prepared(cache, tokenizer="byte", vocab_size=512).model_overrides() == {"vocab_size": 512}
    with pytest.raises(UsageError, match=r"\b261\b.*vocab_size.*\b200\b"):
        prepared(cache, tokenizer="byte", vocab_size=200).model_overrides()


def test_bad_input_is_one_sentence(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 and more".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("To be, or not to be\n" * 3)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"n_positions": 32}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    cases = [
        ({"data": "austin"}, None, r"'austin'.*'austen'"),
        ({"data": str(tmp_path / "*.csv")}, None, "matches '.*csv'"),
        (
            {"data": str(tmp_path / "nothing")},
            None,
            r"nothing' is a folder without a file that ends in \.csv\b.*\.txt\b",
        ),
        ({"data": str(tmp_path / "latin.txt")}, None, r"latin\.txt\b.*\bUTF-8\b.*\bbyte 3\b"),
        ({"data": str(tmp_path / "empty.txt")}, None, "empty.txt holds no text"),
        ({"data": str(tmp_path / "short.txt")}, None, r"\b1 different sample\b.*\bhold any out\b"),
        (
            {"data": str(tmp_path / "short.txt"), "eval_fraction": 0.3},
            None,
            r"\btrain\b.*\b4[01] tokens\b.*\bseq_len 64\b",
        ),
        ({"tokenizer": "model"}, None, "no model folder"),
        ({"tokenizer": "model", "seq_len": 32}, tmp_path / "model", r"\bno tokenizer\b"),
        ({}, tmp_path / "model", r"\bseq_len\b.*\b64\b.*\b32 positions\b"),
        ({"tokenizer": "model"}, tmp_path / "broken", r"\btokenizer\b.*\bbroken\b"),
    ]
    for options, model_dir, message in cases:
        with pytest.raises(UsageError, match=message) as caught:
            prepared(tmp_path / "cache", model_dir=model_dir, **options)
        assert "\n" not in str(caught.value)


def test_a_folder_of_files_without_endings_is_advised_on_and_the_advice_works(tmp_path):
    for name in ("GPL-3", "MIT"):
        (tmp_path / name).write_text(name)
    with pytest.raises(UsageError) as refused:
        text_files.find(str(tmp_path))
    advice = re.search(r"'(.*)' names them all", refused.value.hint)[1]
    assert text_files.find(advice) == [tmp_path / "GPL-3", tmp_path / "MIT"]


# -- tables and the hub ----------------------------------------------------------------------------

STORIES = [f"Once upon a time, story {i} began. " * (1 + i % 3) for i in range(50)]


def write_stories(path, rows=STORIES, column="text"):
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({column: rows}), path)
    else:
        path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    return str(path)


def tokens_of(task, split):
    return np.asarray(np.load(task._folder / f"{split}.npy"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_tables_are_documents(tmp_path, suffix):
    data = write_stories(tmp_path / f"stories{suffix}")
    options = {"data": data, "tokenizer": "byte", "seq_len": 16, "eval_fraction": 0.1}
    task = prepared(tmp_path / "cache", **options)
    tokenizer = task.tokenizer()
    for split, rows in (("train", STORIES[:45]), ("eval", STORIES[45:])):
        ids = [[*tokenizer(row, add_special_tokens=False)["input_ids"], tokenizer.sep_token_id] for row in rows]
        assert tokens_of(task, split).tolist() == list(chain.from_iterable(ids))
    few = prepared(tmp_path / "cache", **options, documents=10)
    assert len(tokens_of(few, "train")) == sum(len(row) + 1 for row in STORIES[:9])


def write_tiny_stories(root, kinds) -> str:
    """The files of hub:roneneldan/TinyStories: parquet by part, and the text files beside them."""
    (root / "data").mkdir(parents=True)
    (root / "README.md").write_text("# A card\n\nof the data set.\n")
    for part, long, rows in (("train", "train", STORIES[:40]), ("validation", "valid", STORIES[40:])):
        if "parquet" in kinds:
            write_stories(root / "data" / f"{part}-00000-of-00001-2d5a1467fff1081b.parquet", rows)
        if "txt" in kinds:
            (root / f"TinyStories-{long}.txt").write_text("".join(f"{row}\n<|endoftext|>\n" for row in rows))
    return str(root)


@pytest.mark.parametrize("kinds", [("parquet",), ("parquet", "txt")])
def test_the_files_of_tiny_stories_are_used_each_for_its_part(tmp_path, kinds):
    """Under --debug, which asks for no number of stories, as with one."""
    data = write_tiny_stories(tmp_path / "TinyStories", kinds)

    def read(*sets):
        recipe = load("tinystories-gpt", (f"task.data={data}", "task.seq_len=8", *sets), debug=True)
        task = tasks.make(recipe.task.name, recipe.task.options)
        task.prepare(tmp_path / "cache", None, workers=1, say=lambda line: None)
        texts = {split: task.tokenizer().decode(tokens_of(task, split)) for split in task.splits}
        return {split: {int(number) for number in re.findall(r"story (\d+)", text)} for split, text in texts.items()}

    held = read()  # a fraction of the training stories, the last of them
    assert held["train"] | held["eval"] == {*range(40)}
    assert read("task.documents=12", "task.eval_fraction=0.25") == {"train": {*range(9)}, "eval": {9, 10, 11}}
    parts = read("task.eval_fraction=null")
    assert parts["eval"] == {*range(40, 50)} and parts["train"] | parts["test"] == {*range(40)}


def test_a_tokenizer_that_names_no_mask_token_is_told_before_the_work(tmp_path):
    crammed_words(tmp_path / "tokenizer")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "tokenizer" / name).unlink(missing_ok=True)
    told = []
    task = tasks.make("masked-lm", {"tokenizer": f"{tmp_path}/tokenizer", "seq_len": 16})
    with pytest.raises(UsageError, match="mask token") as refused:
        task.prepare(tmp_path / "cache", None, workers=1, say=told.append)
    assert "copy them" in refused.value.hint and "tokenizer_config.json" in refused.value.hint
    assert not [*(tmp_path / "cache").glob("text-*")]
    crammed_words(tmp_path / "tokenizer")  # as advised
    task.prepare(tmp_path / "cache", None, workers=1, say=told.append)
    assert task.tokenizer().mask_token == "<mask>"


def test_rows_of_token_ids_are_not_made_into_python_numbers(tmp_path, monkeypatch):
    """43 million rows took a process an hour and a quarter; 100,000 of 128 ids take 1.0 s of it instead of 5.2. Empty
    rows are left out as elsewhere.
    """
    monkeypatch.setattr(user_data, "document_in", lambda *row: pytest.fail("a row became Python numbers"))
    rows = [[], None, *packed_rows(tmp_path, 200)]
    data = write_stories(tmp_path / "packed.parquet", rows, "input_ids")
    task = prepared(tmp_path / "cache", **packed_options(tmp_path, data))
    ids = [everything(task, s)["input_ids"] for s in ("train", "eval")]
    assert [len(part) for part in ids] == [180, 20] and torch.equal(torch.cat(ids), torch.tensor(rows[2:]))
    assert "2 empty rows left out" in task.was_read


def test_token_ids_are_those_of_a_tokenizer_that_has_them(tmp_path):
    rows = packed_rows(tmp_path, 20)
    data = write_stories(tmp_path / "packed.parquet", rows, "input_ids")
    with pytest.raises(UsageError, match=r"\btoken ids\b"):
        prepared(tmp_path / "cache", **packed_options(tmp_path, data) | {"tokenizer": "bpe"})
    for wrong, message in ((261, r"\b261\b.*\b261\b"), (-100, r"\b100\b.*\b261\b")):
        rows[3][7] = wrong
        write_stories(tmp_path / "packed.parquet", rows, "input_ids")
        with pytest.raises(UsageError, match=message):
            prepared(tmp_path / "cache", **packed_options(tmp_path, data))


def test_tables_that_do_not_fit_are_one_sentence(tmp_path):
    data = write_stories(tmp_path / "a.jsonl", column="story")
    cases = [
        ({"data": data}, r"'text'.*'story'"),
        ({"data": write_stories(tmp_path / "b.jsonl", [1, 2])}, r"b\.jsonl, row 1: 1 is not a text"),
        ({"data": "austen", "documents": 5}, r"`documents`"),
        ({"data": ["hub:a/b", "austen"]}, "cannot be mixed"),
        ({"data": "hub:a"}, None),
        ({"data": data, "text": "story", "tokenizer": "hub:openai-community/gpt2"}, r"tokenizer openai-community/gpt2"),
        ({"data": "hub:roneneldan/TinyStories"}, r"roneneldan/TinyStories, split train, .*huggingface"),
    ]
    for options, message in cases:
        with pytest.raises(LeanSurgeonError, match=message) as caught:
            prepared(tmp_path / "cache", **{"tokenizer": "byte", "seq_len": 16, **options})
        assert "\n" not in caught.value.message


def test_ids_of_a_tokenizer_may_have_gaps(tmp_path, cache):
    """Its largest id is beyond its number of tokens, so no table of that size holds what is known of each."""
    words = {"[MASK]": 70_000, "[UNK]": 1, "the": 69_000, "a": 69_001, "of": 69_002, "to": 69_003, "and": 69_004}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", unk_token="[UNK]").save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("the a of to and\n" * 400)
    options = {"data": str(tmp_path / "text.txt"), "tokenizer": f"{tmp_path}/", "seq_len": 16, "eval_fraction": 0.2}
    task = prepared(cache, "masked-lm", **options)
    batch = task.batch("train", np.arange(4), seed=0, epoch=0)
    scored = batch["labels"][batch["labels"] != -100]
    assert len(scored) and set(scored.tolist()) <= set(range(69_000, 69_005))
    assert task.model_overrides() == {"vocab_size": 70_001} and 70_000 in batch["input_ids"]


def test_a_book_in_lines_of_one_width_gives_whole_sentences():
    """Of the shipped novel, against its paragraphs as they read without line breaks."""
    text = text_files.PACKAGED["austen"].read_text()
    found = corpus.sentences(text)
    joined = " ".join(text.split())
    assert all(one.strip() and " ".join(one.split()) in joined for one in found)
    whole = [one for one in found if one[-1] in ".!?" or one[-2:] in ('."', '!"', '?"', ".'")]
    assert len(found) > 3_000 and len(whole) > 0.95 * len(found)
    assert not any(one.endswith((" Mr.", " Mrs.", "Dr.")) for one in found)
    first = next(one for one in found if one.startswith("He had been remarkably"))
    assert first == "He had been remarkably handsome in his youth; and, at fifty-four, was still a very fine man."


def test_lists_verse_and_sentences_a_line_stay_lines():
    titles = [f"Item number {i} in a list of things that are for sale here" for i in range(60)]
    said = [f"This is sentence {i}. It has two halves of a line and ends." for i in range(60)]
    ragged = ["word " * (i % 9 + 5) for i in range(60)]
    numbered = [f"{i}. Examine the water of every lake near town {i % 7} and then" for i in range(10, 70)]
    names = [f"J. R. Brown the {i:02d}th and Mrs. A. B. Green of the other side" for i in range(60)]
    log = [
        f"2024-01-{i % 28 + 1:02d} request {i:03d} done. Took {i * 37 % 900 + 100} ms and no more" for i in range(60)
    ]
    mail = [f"> and it was so in year {1900 + i} as well. But not in every town" for i in range(60)]
    for lines in (titles, said, ragged, numbered, names, log, mail):
        assert corpus.sentences("\n".join(lines)) == list(dict.fromkeys(line.strip() for line in lines))


def packed_rows(folder, count: int) -> list[list[int]]:
    """Rows of 32 token ids, and the tokenizer in `folder` that has them."""
    vocab.make("byte", None, []).save_pretrained(folder / "tokenizer")
    return np.random.default_rng(0).integers(5, 200, (count, 32)).tolist()


def packed_options(folder, data: str) -> dict:
    options = {"data": data, "text": "input_ids", "seq_len": 32, "random_windows": False, "eval_fraction": 0.1}
    return options | {"tokenizer": str(folder / "tokenizer")}
