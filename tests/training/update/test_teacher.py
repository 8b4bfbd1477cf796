"""What a teacher adds to a loss, with loops over samples and tokens; and teachers that cannot teach."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.digests import sha256
from leansurgeon.checkpoints.record import Origin, SurgeryRecord
from leansurgeon.errors import UsageError
from leansurgeon.reading.pooling import Pooling
from leansurgeon.tasks.base import Score, cosine_score
from leansurgeon.training import distill
from leansurgeon.training.recipe.schema import Distill, Train
from tests.conftest import build
from tests.support.training_standin import Words

CPU = torch.device("cpu")


class Asks(Words):
    """A task with another head; nothing of it is scored here."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.head = head


def cut_from(loaded, *layers: int):
    """The student as the command loads it: cut from these layers."""
    loaded.surgery = SimpleNamespace(plan=SimpleNamespace(layers=layers), tower=None)
    return loaded


def taught(settings: Distill, student, teacher, task, monkeypatch) -> distill.Distillation:
    monkeypatch.setattr(distill, "load_teacher", lambda *_: (teacher, None, lambda batch: batch))
    return distill.Distillation(settings, student, task, teacher.folder, CPU)


def score_of(made: distill.Distillation, student, batch, score: Score) -> Score:
    """What the teacher adds to a score, with the student's pass inside the teacher's."""
    with made.teaching(batch) as said:
        logits = student.forward({name: value for name, value in batch.items() if name != "labels"})
    return made.add_to_score(score, logits, said, batch)


@pytest.fixture
def pair(tmp_path):
    """Makes a student of two layers, cut from the first and the third of four, and its teacher, both random."""

    def make(family: str, depth: str, head: str = ""):
        for name, layers in (("student", 2), ("teacher", 4)):
            model = build(family, seed=layers, **{depth: layers})
            (model.base_model if head == "features" else model).save_pretrained(tmp_path / name)
        student, teacher = (checkpoints.load(tmp_path / name) for name in ("student", "teacher"))
        return cut_from(student, 0, 2), teacher

    return make


def outputs(loaded, blocks: str, batch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What every block says, (B, T, D) each, and the logits or the last states."""
    states = []
    hooks = [
        block.register_forward_hook(lambda _m, _i, out: states.append(out[0] if isinstance(out, tuple) else out))
        for block in loaded.model.get_submodule(blocks)
    ]
    with torch.no_grad():
        out = loaded.model(**{name: entry for name, entry in batch.items() if name != "labels"})
    for hook in hooks:
        hook.remove()
    return states, out[0]


def mean_square(difference: torch.Tensor, real) -> float:
    """Over the real tokens of one sample, (T, D)."""
    kept = [row for row, here in zip(difference, real, strict=True) if here]
    return sum(float((row**2).mean()) for row in kept) / len(kept)


def text() -> dict[str, torch.Tensor]:
    """Three samples of which the last is shorter; 3, 2 and 1 tokens have labels, two of them the first one."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 61, (3, 6), generator=draw)
    mask, labels = torch.ones_like(ids), torch.full_like(ids, -100)
    mask[2, 4:] = 0
    for sample, token in ((0, 0), (0, 2), (0, 5), (1, 0), (1, 3), (2, 1)):
        labels[sample, token] = ids[sample, token]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(
    ("family", "depth", "blocks", "head"),
    [
        ("bert", "num_hidden_layers", "bert.encoder.layer", "masked-lm"),
        ("gpt2", "n_layer", "transformer.h", "causal-lm"),
    ],
)
def test_logits_and_hidden_states_of_a_text_by_hand(family, depth, blocks, head, relative, pair, monkeypatch):
    student, teacher = pair(family, depth)
    settings = Distill(logits=0.5, hidden=3.0, relative=relative, temperature=2.0)
    made = taught(settings, student, teacher, Asks(head), monkeypatch)
    assert not teacher.model.training and not any(p.requires_grad for p in teacher.model.parameters())
    batch = text()
    ours, logits = outputs(student, blocks, batch)
    theirs, wanted = outputs(teacher, blocks, batch)
    ahead = head == "causal-lm"  # the logits of a token are those of the next one
    scored = [[i for i, label in enumerate(row) if label != -100 and i >= ahead] for row in batch["labels"].tolist()]
    assert [len(places) for places in scored] == ([2, 1, 1] if ahead else [3, 2, 1])
    expected = 0.0
    for sample, places in enumerate(scored):
        for place in places:
            p, q = (torch.log_softmax(of[sample, place - ahead] / 2.0, -1) for of in (logits, wanted))
            expected += 0.5 * 4.0 * float((q.exp() * (q - p)).sum())
        real = batch["attention_mask"][sample]
        for mine, its in ((ours[0], theirs[1]), (ours[1], theirs[3])):  # the layers that each stands for end there
            error = mean_square((mine - its)[sample], real)
            share = mean_square(its[sample], real) if relative else 1.0
            expected += 3.0 * len(places) * error / share / 2
    # `outputs` has left what the student's blocks said.
    added = score_of(made, student, batch, Score(torch.tensor(7.0), torch.tensor(1.0), 2, 3))
    assert added.loss_sum.item() - 7.0 == pytest.approx(expected, rel=1e-4)
    assert added[1:4] == (1.0, 2, 3)
    # A copy of the student, as early layers are looked at, has taps of its own.
    copied = cut_from(checkpoints.load(student.folder), 0, 2)
    again = score_of(made.of_copy(copied), copied, batch, Score(torch.tensor(7.0), 1, 2, 3))
    assert again.loss_sum.item() == pytest.approx(added.loss_sum.item(), rel=1e-6)


def test_shares_of_classes_count_as_one_and_a_sample_without_any_as_none(pair, monkeypatch):
    student, teacher = pair("vit", "num_hidden_layers")
    made = taught(Distill(logits=1.0, hidden=2.0), student, teacher, Asks("image-classification"), monkeypatch)
    pixels = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(3, 10)
    labels[0, 2], labels[0, 5], labels[1, 7] = 0.3, 0.7, 1.0
    ours, logits = outputs(student, "vit.layers", {"pixel_values": pixels})
    theirs, wanted = outputs(teacher, "vit.layers", {"pixel_values": pixels})
    whole = [True] * ours[0].shape[1]
    hidden = sum(mean_square((ours[i] - theirs[2 * i + 1])[b], whole) for i in (0, 1) for b in (0, 1)) / 2
    kl = F.kl_div(logits[:2].log_softmax(-1), wanted[:2].softmax(-1), reduction="sum")
    batch = {"pixel_values": pixels, "labels": labels}
    added = score_of(made, student, batch, Score(torch.zeros(()), 1, 2, 3))
    assert added.loss_sum.item() == pytest.approx(2 * hidden + float(kl), rel=1e-4)
    classes = torch.tensor([4, -100, 1])
    added = score_of(made, student, batch | {"labels": classes}, Score(torch.zeros(()), 1, 2, 3))
    hidden = sum(mean_square((ours[i] - theirs[2 * i + 1])[b], whole) for i in (0, 1) for b in (0, 2)) / 2
    kl = F.kl_div(logits[::2].log_softmax(-1), wanted[::2].softmax(-1), reduction="sum")
    assert added.loss_sum.item() == pytest.approx(2 * hidden + float(kl), rel=1e-4)


def test_embeddings_and_hidden_states_of_sentences_by_hand(pair, monkeypatch):
    student, teacher = pair("bert", "num_hidden_layers", "features")
    task = Asks("features")
    task.score = lambda states, batch: cosine_score(states, batch)
    made = taught(Distill(logits=0, hidden=3.0), student, teacher, task, monkeypatch)
    batch = text() | {"labels": torch.tensor([0, 0, -100])}
    ours, last = outputs(student, "encoder.layer", batch)
    theirs, target = outputs(teacher, "encoder.layer", batch)
    cosines, hidden = 0.0, 0.0
    for sample in (0, 1):  # the third has no label
        real = batch["attention_mask"][sample].bool()
        pooled = [states[sample][real].mean(0) for states in (last, target)]
        cosines += 1 - float(F.cosine_similarity(*pooled, dim=0))
        pairs = ((ours[0], theirs[1]), (ours[1], theirs[3]), (last, target))
        hidden += sum(mean_square((a - b)[sample], real) for a, b in pairs) / 3
    judged = made.of_features(student, batch, learning=False)
    assert judged.loss_sum.item() == pytest.approx(cosines, rel=1e-4)
    assert all(tap._state is None for tap in made._student_states)  # nothing is held from one batch to the next
    learning = made.of_features(student, batch, learning=True)
    assert learning.loss_sum.item() == pytest.approx(cosines + 3 * hidden, rel=1e-4)
    plain = taught(Distill(logits=0, hidden=0.0), student, teacher, task, monkeypatch)
    assert plain.of_features(student, batch, learning=True).loss_sum.item() == pytest.approx(cosines, rel=1e-4)


def test_states_are_pooled_over_real_tokens_or_places():
    states = torch.arange(24.0).reshape(2, 3, 4)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert Pooling().pool(states, mask).tolist() == [[2.0, 3.0, 4.0, 5.0], [0.0] * 4]
    assert Pooling().pool(states, ~mask).tolist()[0] == [8.0, 9.0, 10.0, 11.0]  # a single token
    assert Pooling().pool(states, None).tolist() == [[4.0, 5.0, 6.0, 7.0], [16.0, 17.0, 18.0, 19.0]]
    assert torch.equal(Pooling().pool(states, mask[:, :2]), Pooling().pool(states, None))  # a mask of other tokens
    assert torch.equal(Pooling().pool(states[0], mask), states[0])
    places = states.reshape(2, 3, 2, 2)  # timm's maps: no token is padding
    assert Pooling().pool(places, mask).tolist() == [[5.0, 6.0], [17.0, 18.0]]


def test_errors_of_maps_of_vectors_and_of_samples_without_tokens():
    state, target = torch.zeros(2, 2, 2, 3), torch.full((2, 2, 2, 3), 2.0)
    target[0, 0, 0] = 4.0
    assert distill.state_error(state, target, None).tolist() == [7.0, 4.0]  # (16 + 3 * 4) / 4
    assert distill.state_error(state[:, 0, 0] + 1, target[:, 0, 0], None).tolist() == [9.0, 1.0]
    mask = torch.tensor([[True, False], [False, False]])
    assert distill.state_error(state[:, 0], target[:, 0], mask).tolist() == [16.0, 0.0]
    assert distill.state_error(state[:, 0], target[:, 0], mask[:, :1]).tolist() == [10.0, 4.0]
    half = torch.full((1, 1, 1), 300.0, dtype=torch.float16)  # whose square is beyond half precision
    assert distill.state_error(half, 0 * half, None).item() == 90_000
    with pytest.raises(UsageError, match=r"\(2, 2, 3\).*\bteacher\b.*\(2, 1, 3\)"):
        distill.state_error(state[:, 0], target[:, 0, :1], None)


def of(depth: int, layers=None):
    """A model by its depth, as far as maps of layers ask."""
    shape = SimpleNamespace(stages=[SimpleNamespace(depth=depth)])
    surgery = None if layers is None else SimpleNamespace(plan=SimpleNamespace(layers=layers))
    return SimpleNamespace(architecture=SimpleNamespace(shape=lambda _: shape), config={}, surgery=surgery)


def test_layers_follow_the_record_or_are_the_same():
    assert distill.targets(of(2, (0, 3)), of(6), "t") == [2, 5]
    assert distill.targets(of(3), of(3), "t") == [0, 1, 2]  # as deep as its teacher, of which no record says anything
    assert distill.targets(of(3, (1, 4)), of(3), "t") == [0, 1, 2]  # the record is about another model
    for student, teacher, says in (
        (of(2), of(6), r"\b0 layers\b.*\b2 and 6\b"),
        (of(2, (0, 6)), of(6), r"\b2 layers\b.*\b2 and 6\b"),
        (of(2, (0, 1, 2)), of(6), r"\b3 layers\b.*\b2 and 6\b"),
    ):
        with pytest.raises(UsageError, match=says):
            distill.targets(student, teacher, "t")


def test_a_teacher_is_trained_and_known_and_has_the_head(saved, tmp_path):
    folder, model = saved("bert")
    task, student = Asks("masked-lm"), checkpoints.load(folder)

    def teacher(name: str, **settings):
        return distill.load_teacher(Distill(teacher=name, **settings), tmp_path, student, task)[0]

    with pytest.raises(UsageError, match=r"surgery\.json"):
        teacher("source")
    with pytest.raises(UsageError, match="learned nothing"):
        teacher("bert-crammed")
    assert teacher(str(folder)).source.learned
    named = str(tmp_path / "headless")
    model.bert.save_pretrained(named)
    with pytest.raises(UsageError, match=r"\bmasked-lm\b.*new"):
        teacher(named)
    with pytest.raises(UsageError, match=r"\bmasked-lm\b.*new"):
        distill.Distillation(Distill(teacher=named, logits=0.1, hidden=1), student, task, folder, CPU)
    hidden = distill.Distillation(Distill(teacher=named, logits=0, hidden=1), student, task, folder, CPU)
    assert hidden.teacher.source.name  # its head says nothing


def test_the_source_is_opened_by_its_name_or_where_it_lies(own_cache, saved, tmp_path, monkeypatch):
    origin = dict(kind="folder", name="somewhere/teacher", sha256={"model.safetensors": "0" * 64})
    named = Origin(**origin | {"kind": "preset", "name": "digits-vit"})
    assert distill.place_of(named) == "digits-vit"
    assert distill.place_of(Origin(**origin | {"sha256": {}})) == "somewhere/teacher"
    with pytest.raises(UsageError, match="somewhere/teacher"):
        distill.place_of(Origin(**origin))
    folder, _ = saved("bert")
    here = Origin(str(folder), "folder", sha256={"model.safetensors": sha256(folder / "model.safetensors")})
    assert distill.place_of(here) == str(folder)
    student, towers, load = checkpoints.load(folder), [], checkpoints.load
    monkeypatch.setattr(distill, "load", lambda *a, tower: towers.append(tower) or load(*a))
    student.surgery = SimpleNamespace(source=here, tower="vision")
    assert distill.load_teacher(Distill(), tmp_path, student, Asks("masked-lm"))[0].folder == folder
    assert towers == ["vision"]  # of a model with several
    record.write(folder, SurgeryRecord(Origin("bert-crammed", "preset", "bert-crammed"), initialised="fresh"))
    with pytest.raises(UsageError, match="learned nothing"):  # it has weights, and they were drawn
        distill.load_teacher(Distill(teacher=str(folder)), tmp_path, student, Asks("masked-lm"))


def test_a_task_without_labels_needs_a_teacher_and_no_logits(pair, monkeypatch):
    student, teacher = pair("bert", "num_hidden_layers", "features")
    plain = {"duration": "1ep", "batch": 8, "optim": {"lr": 1e-3}}
    task = Asks("features")
    with pytest.raises(UsageError, match=r"'words'") as caught:
        distill.of_recipe(Train(**plain), student, task, student.folder, CPU)
    assert "train.distill=" in caught.value.hint
    assert distill.of_recipe(Train(**plain), student, Asks("masked-lm"), student.folder, CPU) is None
    with pytest.raises(UsageError, match=r"\bBertModel\b.*\b0\.5\b"):
        taught(Distill(logits=0.5, hidden=1.0), student, teacher, task, monkeypatch)
    given = Train(**plain, distill={"teacher": str(teacher.folder), "logits": 0, "hidden": 1})
    made = distill.of_recipe(given, student, task, student.folder, CPU)
    assert made.settings is given.distill and made.teacher.folder == teacher.folder
