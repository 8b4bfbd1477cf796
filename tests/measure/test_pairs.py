"""Pairs for models with an encoder and a decoder, against what the library does with the same answers."""

from __future__ import annotations

import csv
import json
from itertools import pairwise

import pytest
import torch

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.pairs import IGNORED, open_pairs
from leansurgeon.measure.heads.judge import Labelled
from tests.support.content import side_of
from tests.support.models.word_models import WORDS

# Special tokens as the two families number them, and what stands around every sentence.
SPECIAL = {
    "t5": (["<pad>", "</s>", "<unk>", *(f"<extra_id_{i}>" for i in range(8))], "$A </s>"),
    "bart": (["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "<s> <s> $A </s> </s>"),
}


@pytest.fixture(params=["t5", "bart"])
def family(request) -> str:
    return request.param


@pytest.fixture
def model(family, saved):
    """(folder, model, tokenizer of words): T5's has names for spans, BART's a mask token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder, model = saved(family, decoder_start_token_id={"t5": 0, "bart": 2}[family])
    special, around = SPECIAL[family]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(token, vocabulary[token]) for token in ("<s>", "</s>") if token in vocabulary]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=ends)
    named = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    named |= dict(bos_token="<s>", mask_token="<mask>") if family == "bart" else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.save_pretrained(folder)
    return folder, model, fast


@pytest.fixture
def lines() -> list[str]:
    """Sixty sentences of 7 to 36 words, all different."""
    draws = torch.Generator().manual_seed(0)
    return [" ".join(WORDS[i] for i in torch.randint(50, (7 + n // 2,), generator=draws).tolist()) for n in range(60)]


def opened(folder, path, text: str, **more):
    path.write_text(text)
    return open_pairs(str(path), open_source(str(folder)), **more)


def rows(batches) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(input, answer) of every sample, padding cut off."""
    return [
        (tuple(ids[real.bool()].tolist()), tuple(label[label != IGNORED].tolist()))
        for batch in batches
        for ids, real, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    ]


def test_every_pair_costs_what_it_costs_alone_in_the_library(model, lines, tmp_path):
    folder, library, _ = model
    text = "\n".join(f"{line}\t{' '.join(line.split()[: 3 + n % 5])}" for n, line in enumerate(lines))
    data = opened(folder, tmp_path / "pairs.tsv", text)
    judge = Labelled(checkpoints.load(folder), data.task)
    judge.loaded.model.eval()
    lengths = [{int(real.sum()) for real in batch["attention_mask"]} for batch in data.fit]
    assert max(map(len, lengths)) > 1  # some are padded
    with torch.no_grad():
        for batch in data.fit:
            theirs = library.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
            real = torch.nn.functional.pad(batch["labels"] != IGNORED, (1, -1), value=True)
            assert torch.equal(batch["decoder_input_ids"][real], theirs[real])
            found = judge.losses(judge.forward(batch), batch)
            alone = [
                library(input_ids=torch.tensor([given]), labels=torch.tensor([answer])).loss
                for given, answer in rows([batch])
            ]
            assert torch.allclose(found, torch.stack(alone), rtol=1e-4)


def test_parts_share_no_pair_and_hold_what_the_file_says(model, lines, tmp_path):
    folder, _, tokenizer = model
    said = [(line, " ".join(line.split()[::-1][:5])) for line in lines]
    text = "\n".join(f"{a}\t{b}" for a, b in said * 2)  # a file that says everything twice
    data = opened(folder, tmp_path / "pairs.tsv", text)
    parts = [rows(part) for part in (data.fit, data.guard, data.heldout)]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == encoded(tokenizer, said)
    sides = [side_of(a, b) for a, b in said]
    assert [len(part) for part in parts] == [sides.count(side) for side in ("train", "eval", "test")]
    other = opened(folder, tmp_path / "pairs.tsv", "\n".join(text.split("\n")[::-1]), seed=1)
    assert sorted(rows(other.heldout)) == sorted(parts[2])


def test_hidden_spans_fill_the_gaps_and_are_a_seventh(model, family, lines, tmp_path):
    """T5: the answer's spans in the place of their names give the sentence. BART: the answer is the sentence."""
    folder, _, tokenizer = model
    sentences = {tuple(tokenizer(line)["input_ids"]) for line in lines}
    names = tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(8)] if family == "t5" else ["<mask>"])
    data = opened(folder, tmp_path / "text.txt", "\n".join(lines))
    hidden = total = 0
    for given, answer in rows([*data.fit, *data.guard, *data.heldout]):
        spans = [i for i, token in enumerate(given) if token in names]
        assert spans and 0 not in spans and all(b - a > 1 for a, b in pairwise(spans))
        if family == "t5":
            places = [answer.index(name) for name in names[: len(spans) + 1]]  # the last one closes the answer
            assert places[0] == 0 and answer[places[-1] + 1 :] == (tokenizer.eos_token_id,)
            fills = [answer[a + 1 : b] for a, b in pairwise(places)]
            assert {len(fill) for fill in fills} == {3}
            whole = sum((fills[names.index(t)] if t in names else (t,) for t in given), ())
        else:
            assert len(answer) == len(given) + 2 * len(spans)
            assert given[:2] == answer[:2] and given[-2:] == answer[-2:]  # nothing special is ever hidden
            whole = answer
        assert whole in sentences
        hidden, total = hidden + 3 * len(spans), total + len(whole)
    assert 0.12 < hidden / total < 0.18
    other = opened(folder, tmp_path / "text.txt", "\n".join(lines), seed=1)
    assert other.digest != data.digest


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_table_gives_inputs_and_answers(model, lines, form, tmp_path):
    """Not its lines with their commas; the id is no text, and rows that lack one of both are left out."""
    folder, _, tokenizer = model
    said = [(line, " ".join(line.split()[::-1][:5])) for line in lines]
    table = [{"id": f"R{i}", "input": a, "target": b} for i, (a, b) in enumerate(said)]
    table.append({"id": "R", "input": "a", "target": ""})
    path, told = tmp_path / f"pairs.{form}", []
    with path.open("w", newline="") as file:
        if form == "csv":
            writer = csv.DictWriter(file, ["id", "input", "target"])
            writer.writeheader()
            writer.writerows(table)
        else:
            file.writelines(json.dumps(row) + "\n" for row in table)
    data = open_pairs(str(path), open_source(str(folder)), say=told.append)
    expected = encoded(tokenizer, said)
    assert sorted(rows([*data.fit, *data.guard, *data.heldout])) == expected
    assert told[0] == f"pairs.{form}: 61 rows; input = input; answer = target; 60 pairs; id left out."
    turned = open_pairs(str(path), open_source(str(folder)), columns="input=target,target=input")
    assert sorted(rows([*turned.fit, *turned.guard, *turned.heldout])) == sorted((b, a) for a, b in expected)


@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_files_for_validation_and_test_are_held_out(model, lines, form, tmp_path):
    """Nothing of test.csv is fitted to, nor of validation.csv; a pair of train that stands in test is left out."""
    folder, _, tokenizer = model
    said = [(line, " ".join(line.split()[::-1][:5])) for line in lines]
    train, validation, test = said[:40], said[40:50], said[50:]
    (tmp_path / "data").mkdir()
    for name, some in (("train", [*train, said[55]]), ("validation", validation), ("test", test)):
        with (tmp_path / "data" / f"{name}.{form}").open("w", newline="") as file:
            writer = csv.writer(file, delimiter="," if form == "csv" else "\t")
            writer.writerows([*([("input", "target")] if form == "csv" else []), *some])
    data = open_pairs(str(tmp_path / "data"), open_source(str(folder)))
    found = [sorted(rows(part)) for part in (data.fit, data.guard, data.heldout)]
    assert found == [encoded(tokenizer, some) for some in (train, validation, test)]


def encoded(tokenizer, pairs):
    """Token ids of these pairs, sorted."""
    return sorted(tuple(tuple(tokenizer(text)["input_ids"]) for text in pair) for pair in pairs)
