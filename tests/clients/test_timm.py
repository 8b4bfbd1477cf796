"""timm's own parts, put together as its validation does: the data config, the loader, the accuracy."""

from __future__ import annotations

import pytest
import torch

from tests.clients.cells import kinds
from tests.clients.conftest import loaded
from tests.support.models import strangers

pytestmark = pytest.mark.clients


@kinds("timm's validation")
def test_timms_own_loop_scores_as_plain_torch_does(kind, cut, tmp_path):
    import timm
    from PIL import Image
    from timm.data import create_dataset, create_loader, resolve_model_data_config
    from timm.utils import AverageMeter, accuracy

    folder = strangers.pictures(tmp_path / "images", names=("a", "b", "c", "d", "e"), each=6, side=16)
    model = loaded(cut(kind), kind)
    source = timm.create_model(f"local-dir:{cut(kind)}-source", pretrained=True)
    config = resolve_model_data_config(model)
    assert config == resolve_model_data_config(source) and config["input_size"] == (3, 16, 16)
    dataset = create_dataset("", str(folder))
    loader = create_loader(dataset, **config, batch_size=8, use_prefetcher=False, num_workers=0, device="cpu")
    top1, seen = AverageMeter(), 0
    with torch.no_grad():
        for images, labels in loader:
            (one,) = accuracy(model(images), labels, topk=(1,))
            top1.update(one.item(), len(labels))
            seen += len(labels)
    transform = timm.data.create_transform(**config)
    right = 0
    for number, name in enumerate(("a", "b", "c", "d", "e")):
        for file in sorted((folder / name).iterdir()):
            with torch.no_grad(), Image.open(file) as image:
                right += int(model(transform(image.convert("RGB"))[None]).argmax()) == number
    assert seen == 30 and top1.avg == pytest.approx(100 * right / 30)
