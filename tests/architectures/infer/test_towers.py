"""Models of several towers: each is cut alone, the whole is reloaded by its plain library, and runs on inputs of real
shape (pictures in the places of their tokens, log-mel features, waveforms), where it equals a cut by hand in memory.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from leansurgeon.architectures.limits import follow_taps, move_taps
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.heads.document import study
from leansurgeon.measure.kappa.study import study as kappa_study
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out, decide
from leansurgeon.surgery.undeclared import check_type
from tests.support.models.undeclared import computed, reloaded, small_model
from tests.surgery.cuts import cut

CLIP = 'clip?architectures=["CLIPModel"]'
SIGLIP = 'siglip?architectures=["SiglipModel"]'


def assert_kept(source, result, prefix):
    """The tensors of another tower are as they were."""
    before, after = (load_file(folder / "model.safetensors") for folder in (source, result))
    other = [name for name in before if name.startswith(prefix)]
    assert len(other) > 50 and all(torch.equal(before[name], after[name]) for name in other)


@pytest.mark.parametrize(
    ("name", "tower", "able"),
    [
        ("llava", "vision", "depth heads mlp_dim"),  # features are taken before its last layer
        ("qwen3_vl", "vision", "depth heads mlp_dim"),  # features are taken behind listed layers
        ("mllama", "text", "depth heads mlp_dim"),  # attends to the picture in listed layers
        ("qwen2_audio", "audio", "depth heads mlp_dim"),
        ("llava", "text", "depth heads mlp_dim"),
        ("qwen2_vl", "text", "depth heads mlp_dim"),
        ("qwen2_5_vl", "vision", "depth heads mlp_dim"),  # windows but for listed layers
        ("qwen3_vl", "text", "depth heads mlp_dim"),  # its first layers take in features of the picture
        ("smolvlm", "text", "depth heads mlp_dim"),
        ("idefics3", "vision", "depth heads mlp_dim"),
        ("gemma3", "vision", "depth heads"),  # its pooling head has an MLP as wide
        ("paligemma", "text", "depth heads mlp_dim"),
        ("mllama", "vision", "depth heads mlp_dim"),
        (CLIP, "text", "depth heads mlp_dim"),
        (CLIP, "vision", "depth heads mlp_dim"),
        (SIGLIP, "text", "depth heads mlp_dim"),
        ("qwen2_5_vl_vision", None, "depth heads mlp_dim"),  # alone: patches and their grid
        ("glm4v_vision", None, "depth heads"),
        ("whisper", None, "depth heads mlp_dim"),
        ("wav2vec2", None, "depth heads mlp_dim"),
    ],
)
def test_a_tower(name, tower, able):
    row = check_type(name, tower)
    assert row.built and row.right, row
    assert {kind for kind in ("depth", "heads", "mlp_dim") if row.can(kind)} == set(able.split()), row


@pytest.mark.parametrize(
    ("key", "value", "keep", "followed"),
    [
        ("vision_feature_layer", -2, [0, 1, 3, 4], -2),
        ("vision_feature_layer", -2, [0, 1, 2, 3], -1),  # the last layer was not listened to
        ("vision_feature_layer", [1, -1], [0, 3], [1, -1]),
        ("deepstack_visual_indexes", [1, 2, 3], [1, 2, 3, 4], [0, 1, 2]),
        ("intermediate_layers_indices", [1, 3], [0, 1, 4], [1, 1]),
        ("deepstack_visual_indexes", [1, 2, 3], [0, 1, 3, 4], None),  # two of them behind one layer
        ("deepstack_visual_indexes", [1, 2, 3], [4], None),  # or behind none
    ],
)
def test_what_listens_behind_layers_follows_them(key, value, keep, followed):
    if followed is not None:
        assert follow_taps(key, value, keep, 5) == followed
        return
    with pytest.raises(UsageError):
        follow_taps(key, value, keep, 5)


def test_what_listens_is_clipped_to_the_layers_that_are_counted():
    place = {"vision_feature_layer": [-2, 7], "deepstack_visual_indexes": [1, 7]}
    move_taps(place, [place], None, 3)  # a hidden state stands behind the last layer, too
    assert place == {"vision_feature_layer": [-2, 3], "deepstack_visual_indexes": [1, 2]}


def test_first_layers_that_take_in_pictures_stay(tmp_path):
    small_model("qwen3_vl", tmp_path / "source")
    opened = open_source(str(tmp_path / "source"))
    assert opened.architecture.stay == (3,)
    with pytest.raises(UsageError) as caught:
        plan(opened, RequestedShape(), method=Method(keep="0,2,3,4"))
    keep = caught.value.hint.rpartition("--keep ")[2].rstrip(".")
    assert plan(opened, RequestedShape(), method=Method(keep=keep)).layers == (0, 1, 2, 4)


def test_a_published_config_with_the_text_on_top(tmp_path):
    """As Qwen2-VL was published: the text's numbers stand beside `vision_config`."""
    small_model("qwen2_vl", tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    file.write_text(json.dumps(config | {k: v for k, v in text.items() if k not in ("model_type", "dtype")}))
    _, record = cut(tmp_path / "source", tmp_path / "cut", layers="3")
    made = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert record.tower == "text"
    assert made["text_config"]["num_hidden_layers"] == 3 and "num_hidden_layers" not in made
    assert_kept(tmp_path / "source", tmp_path / "cut", "visual.")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """The folder of a small CLIP, the model, and pictures as sample data."""
    folder = tmp_path_factory.mktemp("clip") / "whole"
    model, config = small_model("clip", folder, architectures=["CLIPModel"])
    generator = torch.Generator().manual_seed(4)
    size = config["vision_config"]["image_size"]
    batches = [{"pixel_values": torch.randn(8, 3, size, size, generator=generator)} for _ in range(6)]
    return folder, model, Calibration("noise", "noise", "-", batches[:4], batches[4:5], batches[5:])


def test_a_tower_is_measured_as_it_is_alone(clip, tmp_path):
    """CLIP's vision tower within CLIP, and saved by itself, which is declared by hand."""
    folder, model, data = clip
    model.vision_model.save_pretrained(tmp_path / "alone")
    inside = study(load(folder, tower="vision").alone(), data)
    alone = study(load(tmp_path / "alone"), data)
    assert len(inside.importance) == len(alone.importance) == 5 * 6
    assert np.allclose(inside.importance, alone.importance, rtol=1e-3)
    assert len(kappa_study(open_source(str(folder), tower="vision"), data, probes=1)["layers"]) == 5


def test_a_tower_is_cut_on_what_it_reads_alone(clip, tmp_path):
    """CLIP as a whole wants pictures and texts at once. The cut is calibrated, proven and healed by the tower alone,
    and nearer to it than one by the weights alone.
    """
    folder, model, data = clip
    opened = open_source(str(folder), tower="vision")
    steps = plan(opened, RequestedShape(), method=Method(keep="0,2,4"))
    record = carry_out(decide(steps, data), tmp_path / "cut")
    carry_out(DecidedCut(steps), tmp_path / "plain", check=False)
    assert record.proof.parameters and record.tower == "vision"
    batch = data.heldout[0]
    with torch.no_grad():
        wanted = model.vision_model(**batch)[0]
        found = [load(tmp_path / name).features(batch) for name in ("cut", "plain")]
        assert torch.allclose(load(folder, tower="vision").features(batch), wanted, atol=1e-5)
    near, far = (float((wanted - one).norm() / wanted.norm()) for one in found)
    assert near < 0.9 * far
    assert_kept(folder, tmp_path / "cut", "text_model")


def test_heads_of_half_the_size(tmp_path):
    """They stay with the library's own class, and lose little where scores use half of a head's entries."""
    model, config = small_model("wav2vec2", tmp_path / "source")
    opened = open_source(str(tmp_path / "source"))
    stage, file = opened.shape.stages[0], tmp_path / "source" / "model.safetensors"
    state = load_file(file)
    for spec in opened.specs:
        if spec.layer is not None and spec.role in ("q", "k"):
            state[spec.name].reshape(stage.heads, stage.head_dim, -1)[:, stage.head_dim // 2 :] = 0
    save_file(state, file, metadata={"format": "pt"})
    wanted = RequestedShape(heads="2x", head_dim="split")
    steps = plan(open_source(str(tmp_path / "source")), wanted, method=Method(uncalibrated=True))
    carry_out(decide(steps), tmp_path / "cut", check=False)
    assert steps.architecture.library == "transformers" and steps.after.stages[0].heads == 2 * stage.heads
    before, after = (computed(reloaded(tmp_path / name, model), config) for name in ("source", "cut"))
    assert float((before - after).norm() / before.norm()) < 0.2


def test_heads_that_rotate_are_not_divided(tmp_path):
    small_model("gptj", tmp_path / "source")
    opened = open_source(str(tmp_path / "source"))
    with pytest.raises(UnsupportedModel, match="queries and keys"):
        plan(opened, RequestedShape(heads="2x", head_dim="split"), method=Method(uncalibrated=True))
