"""What a teacher adds to a loss, with loops over samples and tokens; and teachers that cannot teach."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.record import Origin, SurgeryRecord
from leansurgeon.errors import UsageError
from leansurgeon.tasks import wide_loss
from leansurgeon.tasks.base import Score, cosine_score, token_score
from leansurgeon.training import distill
from leansurgeon.training.recipe.schema import Distill, Train
from tests.conftest import build
from tests.support.training_standin import Words

CPU = torch.device("cpu")


@pytest.mark.parametrize("at_once", [7, 2**19])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_divergence_and_its_gradient_are_torchs_own(at_once, kind, monkeypatch):
    """A few rows at a time or all of them; 2 x 5 places of 11 classes, of which some do not count."""
    monkeypatch.setitem(wide_loss.AT_ONCE, "cpu", at_once)
    draw = torch.Generator().manual_seed(0)
    student, teacher = (4 * torch.randn(2, 5, 11, generator=draw) for _ in range(2))
    student, teacher = student.to(kind).requires_grad_(), teacher.to(kind)
    counted = torch.rand(2, 5, generator=draw) < 0.7
    made = distill.divergence(student, teacher, counted, 1.7)
    (gradient,) = torch.autograd.grad(3 * made, student)
    logs = [torch.log_softmax(logits.double() / 1.7, -1) for logits in (student, teacher)]
    wanted = 1.7**2 * (logs[1].exp() * (logs[1] - logs[0])).sum(-1)[counted].sum()
    (theirs,) = torch.autograd.grad(3 * wanted, student)
    assert made.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(gradient, theirs, rtol=1e-2 if kind == torch.bfloat16 else 1e-4, atol=1e-5)


@pytest.mark.parametrize("at_once", [7, 2**19])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_tokens_and_its_gradient_are_torchs_own(at_once, smoothing, monkeypatch):
    monkeypatch.setitem(wide_loss.AT_ONCE, "cpu", at_once)
    draw = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(2, 5, 11, generator=draw)).bfloat16().requires_grad_()
    labels = torch.tensor([[3, -100, 0, 10, 1], [7, 7, -100, -100, 2]])
    made = token_score(logits, labels, smoothing)
    (gradient,) = torch.autograd.grad(3 * made.loss_sum, logits)
    rows = logits.double().flatten(0, 1)
    wanted = F.cross_entropy(rows, labels.flatten(), reduction="sum", label_smoothing=smoothing)
    (theirs,) = torch.autograd.grad(3 * wanted, logits)
    assert made.loss_sum.item() == pytest.approx(wanted.item(), rel=1e-6)
    plain = F.cross_entropy(rows, labels.flatten(), reduction="sum")
    assert made.metric_sum.item() == pytest.approx(plain.item(), rel=1e-6) and made.loss_count == 7
    torch.testing.assert_close(gradient, theirs, rtol=1e-2, atol=1e-5)


def test_small_gradients_in_fp16_are_there_for_the_scaled_loss():
    logits = torch.tensor([[[0.0, 17.0]]], dtype=torch.float16, requires_grad=True)
    (65536 * token_score(logits, torch.tensor([[1]])).loss_sum).backward()
    assert logits.grad[0, 0, 0].item() == pytest.approx(65536 * torch.tensor(-17.0).exp().item(), rel=1e-2)


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


def added_loss(made: distill.Distillation, student, batch) -> float:
    """What the teacher adds to a score, with the student's pass inside the teacher's."""
    before = Score(torch.tensor(7.0), torch.tensor(1.0), 2, 3)
    with made.teaching(batch) as said:
        logits = student.forward({name: value for name, value in batch.items() if name != "labels"})
    score = made.add_to_score(before, logits, said, batch)
    assert score[1:4] == before[1:4]
    return score.loss_sum.item() - 7.0


@pytest.fixture
def pair(tmp_path):
    """Makes a student of two layers, cut from the first and the third of four, and its teacher, both random."""

    def make(family: str, depth: str = "num_hidden_layers", head: str = "", **of_teacher):
        for name, layers, more in (("student", 2, {}), ("teacher", 4, of_teacher)):
            model = build(family, seed=layers, **{depth: layers}, **more)
            (model.base_model if head == "features" else model).save_pretrained(tmp_path / name)
        student, teacher = (checkpoints.load(tmp_path / name) for name in ("student", "teacher"))
        return cut_from(student, 0, 2), teacher

    return make


def outputs(loaded, batch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What every block says, (B, T, D) each, and the logits or the last states."""
    states = []
    hooks = [
        block.register_forward_hook(lambda _m, _i, out: states.append(out[0] if isinstance(out, tuple) else out))
        for block in loaded.blocks
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
    ids = torch.randint(3, 61, (3, 6), generator=torch.Generator().manual_seed(3))
    mask, labels = torch.ones_like(ids), torch.full_like(ids, -100)
    mask[2, 4:] = 0
    for sample, token in ((0, 0), (0, 2), (0, 5), (1, 0), (1, 3), (2, 1)):
        labels[sample, token] = ids[sample, token]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    ("family", "depth", "head", "relative"),
    [("bert", "num_hidden_layers", "masked-lm", True), ("gpt2", "n_layer", "causal-lm", False)],
)
def test_logits_and_hidden_states_of_a_text_by_hand(family, depth, head, relative, pair, monkeypatch):
    student, teacher = pair(family, depth, vocab_size=64)  # a table that is filled up: of three rows no token is known
    settings = Distill(logits=0.5, hidden=3.0, relative=relative, temperature=2.0)
    made = taught(settings, student, teacher, Asks(head), monkeypatch)
    assert not teacher.model.training and not any(p.requires_grad for p in teacher.model.parameters())
    batch = text()
    (ours, logits), (theirs, wanted) = outputs(student, batch), outputs(teacher, batch)
    ahead = head == "causal-lm"  # the logits of a token are those of the next one
    expected = 0.0
    for sample, labels in enumerate(batch["labels"].tolist()):
        places = [place for place, label in enumerate(labels) if label != -100 and place >= ahead]
        for place in places:
            p, q = (torch.log_softmax(of[sample, place - ahead] / 2.0, -1) for of in (logits, wanted[..., :61]))
            expected += 0.5 * 4.0 * float((q.exp() * (q - p)).sum())
        real = batch["attention_mask"][sample]
        for mine, its in ((ours[0], theirs[1]), (ours[1], theirs[3])):  # the layers that each stands for end there
            error = mean_square((mine - its)[sample], real)
            share = mean_square(its[sample], real) if relative else 1.0
            expected += 3.0 * len(places) * error / share / 2
    assert added_loss(made, student, batch) == pytest.approx(expected, rel=1e-4)
    # A copy of the student, as early layers are looked at, has taps of its own.
    copied = cut_from(checkpoints.load(student.folder), 0, 2)
    assert added_loss(made.of_copy(copied), copied, batch) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mixed", [True, False])
def test_shares_of_classes_count_as_one_and_a_sample_without_any_as_none(mixed, pair, monkeypatch):
    student, teacher = pair("vit")
    made = taught(Distill(logits=1.0, hidden=2.0), student, teacher, Asks("image-classification"), monkeypatch)
    pixels = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    if mixed:
        labels, labelled = torch.zeros(3, 10), [0, 1]
        labels[0, 2], labels[0, 5], labels[1, 7] = 0.3, 0.7, 1.0
    else:
        labels, labelled = torch.tensor([4, -100, 1]), [0, 2]
    batch = {"pixel_values": pixels, "labels": labels}
    (ours, logits), (theirs, wanted) = outputs(student, batch), outputs(teacher, batch)
    errors = [(ours[0] - theirs[1]), (ours[1] - theirs[3])]
    hidden = sum(float((error[sample] ** 2).mean()) for error in errors for sample in labelled) / 2
    logs = [one[labelled].log_softmax(-1) for one in (logits, wanted)]
    kl = F.kl_div(logs[0], logs[1].exp(), reduction="sum")
    assert added_loss(made, student, batch) == pytest.approx(2 * hidden + float(kl), rel=1e-4)


def test_embeddings_and_hidden_states_of_sentences_by_hand(pair, monkeypatch):
    student, teacher = pair("bert", head="features")
    task = Asks("features")
    task.score = lambda states, batch: cosine_score(states, batch)
    batch = text() | {"labels": torch.tensor([0, 0, -100])}
    (ours, last), (theirs, target) = outputs(student, batch), outputs(teacher, batch)
    cosines, hidden = 0.0, 0.0
    for sample in (0, 1):  # the third has no label
        real = batch["attention_mask"][sample].bool()
        pooled = [states[sample][real].mean(0) for states in (last, target)]
        cosines += 1 - float(F.cosine_similarity(*pooled, dim=0))
        pairs = ((ours[0], theirs[1]), (ours[1], theirs[3]), (last, target))
        hidden += sum(mean_square((a - b)[sample], real) for a, b in pairs) / 3
    for share, learning, wanted in ((3.0, False, cosines), (3.0, True, cosines + 3 * hidden), (0.0, True, cosines)):
        made = taught(Distill(logits=0, hidden=share), student, teacher, task, monkeypatch)
        found = made.of_features(student, batch, learning=learning).loss_sum
        assert found.item() == pytest.approx(wanted, rel=1e-4)


def test_states_of_half_precision_and_of_other_shapes():
    half = torch.full((1, 1, 1), 300.0, dtype=torch.float16)  # whose square is beyond half precision
    assert distill.state_error(half, 0 * half, None).item() == 90_000
    with pytest.raises(UsageError, match=r"\(2, 2, 3\).*\bteacher\b.*\(2, 1, 3\)"):
        distill.state_error(torch.zeros(2, 2, 3), torch.zeros(2, 1, 3), None)


def of(depth: int, layers=None):
    """A model by its depth, as far as maps of layers ask."""
    shape = SimpleNamespace(stages=[SimpleNamespace(depth=depth)])
    surgery = None if layers is None else SimpleNamespace(plan=SimpleNamespace(layers=layers))
    return SimpleNamespace(architecture=SimpleNamespace(shape=lambda _: shape), config={}, surgery=surgery)


def test_a_layer_stands_for_those_dropped_behind_it():
    assert distill.targets(of(2, (0, 3)), of(6), "t") == [2, 5]
    assert distill.last_of([0, 2, 4], [4, 2]) == [1, 3, 5]  # within a stage
    assert distill.targets(of(3, (1, 4)), of(3), "t") == [0, 1, 2]  # as deep: the record is about another model
    for student in (of(2), of(2, (0, 6)), of(2, (0, 1, 2))):
        with pytest.raises(UsageError, match=r"\d layers\b.*\b2 and 6\b"):
            distill.targets(student, of(6), "t")


def test_a_teacher_is_trained_and_known_and_has_the_head(saved, tmp_path):
    folder, model = saved("bert")
    task, student = Asks("masked-lm"), checkpoints.load(folder)
    fresh, headless = str(tmp_path / "fresh"), str(tmp_path / "headless")
    model.save_pretrained(fresh)
    record.write(
        tmp_path / "fresh", SurgeryRecord(Origin("bert-crammed", "preset", "bert-crammed"), initialised="fresh")
    )
    model.bert.save_pretrained(headless)

    def teacher(name: str, logits: float = 1.0):
        settings = Distill(teacher=name, logits=logits, hidden=1)
        return distill.Distillation(settings, student, task, folder, CPU).teacher

    for name, says in (
        ("source", r"surgery\.json"),
        ("bert-crammed", "is untrained"),
        (fresh, "is untrained"),  # it has weights, and they were drawn
        (headless, r"\bmasked-lm\b.*new"),
    ):
        with pytest.raises(UsageError, match=says):
            teacher(name)
    assert teacher(str(folder)).source.learned
    assert teacher(headless, logits=0.0).source.name  # its head says nothing


def test_a_task_without_labels_needs_a_teacher_and_no_logits(pair, monkeypatch):
    student, teacher = pair("bert", head="features")
    plain = {"duration": "1ep", "batch": 8, "optim": {"lr": 1e-3}}
    task = Asks("features")
    with pytest.raises(UsageError, match=r"'words'") as caught:
        distill.of_recipe(Train(**plain), student, task, student.folder, CPU)
    assert "train.distill=" in caught.value.hint
    with pytest.raises(UsageError, match=r"\bBertModel\b.*\b0\.5\b"):
        taught(Distill(logits=0.5, hidden=1.0), student, teacher, task, monkeypatch)
