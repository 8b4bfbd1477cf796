"""Our readers of CIFAR-10, tables and image folders beside the libraries that read them, too: seconds and memory.

Seconds of the processor, each in a process of its own, from files to the first row and through all of them twice;
ratios of one run. Run with `OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/test_readers.py`.
What is printed is why the readers stand: a library takes the place of one that is no better than it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

ROWS, IMAGES = 200_000, 4_000
MEASURED = """
import json, resource, sys, time
from pathlib import Path
data, cache = map(Path, sys.argv[1:])
{imports}
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
{body}
seconds = time.process_time() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({{"seconds": seconds, "mebibytes": peak / 1024, "seen": seen}}))
"""
OURS_TASK = """
task = tasks.make({name!r}, {options})
task.prepare(cache, None, workers=1, say=lambda text: None)
seen = 0
for epoch in range(2):
    for indices in np.arange(task.size("train")).reshape(-1, 100):
        seen += len(task.batch("train", indices, seed=0, epoch=epoch)["labels"])
"""
LIBRARIES = {
    "cifar10": (
        "import numpy as np, torch, timm.data\nfrom leansurgeon import tasks",
        OURS_TASK.format(name="cifar10", options='{"data": str(data), "augment": False}'),
        "import numpy as np, torch\nfrom torchvision import datasets, transforms\n"
        "from torchvision.datasets import cifar\n"
        "datasets.CIFAR10._check_integrity = lambda self: True\ncifar.check_integrity = lambda *rest: True",
        """
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)])
loader = torch.utils.data.DataLoader(datasets.CIFAR10(data, train=True, transform=transform), batch_size=100)
seen = sum(len(labels) for epoch in range(2) for _, labels in loader)
""",
    ),
    "table": (
        "from leansurgeon.reading import tables",
        """
rows = data / "rows.csv"
seen = sum(len(row[0]) > 0 for epoch in range(2) for _, row in tables.read(rows, ["text", "label"]))
""",
        "import datasets",
        """
rows = datasets.load_dataset("csv", data_files=str(data / "rows.csv"), cache_dir=str(cache), split="train")
seen = sum(len(row["text"]) > 0 for epoch in range(2) for row in rows)
""",
    ),
    "images": (
        "import numpy as np, torch, timm.data\nfrom leansurgeon import tasks",
        OURS_TASK.format(
            name="folder", options='{"data": str(data), "image_size": 64, "augment": False, "crop_pct": 1.0}'
        ),
        "import numpy as np, torch, datasets\nfrom timm.data import create_transform",
        """
transform = create_transform(64, is_training=False, crop_pct=1.0, interpolation="bicubic")
rows = datasets.load_dataset("imagefolder", data_dir=str(data), cache_dir=str(cache), split="train")
rows = rows.with_transform(lambda batch: {
    "pixels": [transform(image.convert("RGB")) for image in batch["image"]], "label": batch["label"]
})
seen = 0
for epoch in range(2):
    for batch in rows.iter(batch_size=100):
        seen += len(torch.stack(batch["pixels"]))
""",
    ),
}


def cifar10(folder: Path) -> None:
    """The published layout with noise for images; torchvision's check of the published digests is left out."""
    draws, inside = np.random.default_rng(0), folder / "cifar-10-batches-py"
    inside.mkdir()
    labels = [i % 10 for i in range(10_000)]
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {"data": draws.integers(0, 256, (10_000, 3072), dtype=np.uint8), "labels": labels}
        (inside / name).write_bytes(as_python_2(batch))
    (inside / "batches.meta").write_bytes(as_python_2({"label_names": [f"class {i}" for i in range(10)]}))
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(inside, "cifar-10-batches-py")


def as_python_2(batch: dict[str, object]) -> bytes:
    """A pickle whose keys are strings of Python 2, as those of the published files."""
    content = pickle.dumps(batch, 3)
    for key in batch:
        content = content.replace(
            b"X" + len(key).to_bytes(4, "little") + key.encode(), b"U" + bytes([len(key)]) + key.encode()
        )
    return content


def table(folder: Path) -> None:
    """Rows of some twenty words."""
    draws = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(1000)])
    with (folder / "rows.csv").open("w") as file:
        file.write("text,label\n")
        file.writelines(f"{' '.join(words[draws.integers(0, 1000, 20)])},{i % 2}\n" for i in range(ROWS))


def images(folder: Path) -> None:
    """JPEG files of 96 pixels in ten folders of classes."""
    from PIL import Image

    draws = np.random.default_rng(0)
    for i in range(IMAGES):
        place = folder / ("train" if i % 10 else "val") / f"class{i // 10 % 10}" / f"{i}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draws.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((96, 96))
        file = io.BytesIO()
        coarse.save(file, "jpeg")
        place.write_bytes(file.getvalue())


@pytest.mark.benchmark
@pytest.mark.parametrize(("name", "make"), [("cifar10", cifar10), ("table", table), ("images", images)])
def test_readers_are_no_worse_than_the_libraries(name, make, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    make(data)
    ours, theirs = LIBRARIES[name][:2], LIBRARIES[name][2:]
    found = {}
    for who, (imports, body) in (("ours", ours), ("library", theirs)):
        script = MEASURED.format(imports=imports, body=body)
        done = subprocess.run(
            [sys.executable, "-c", script, str(data), str(tmp_path / who)],
            env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[who] = json.loads(done.stdout.splitlines()[-1])
    told = "; ".join(f"{who} {one['seconds']:.1f} s, {one['mebibytes']:.0f} MiB" for who, one in found.items())
    print(f"\n{name}: {told}")
    assert found["ours"]["seen"] == found["library"]["seen"] > 0
    assert found["ours"]["seconds"] < 1.2 * found["library"]["seconds"]
    assert found["ours"]["mebibytes"] < 1.2 * found["library"]["mebibytes"] + 20
