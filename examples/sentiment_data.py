"""Film reviews for recipe crammed-bert-sentiment, and text to pretrain on, from a package that PyPI serves.

Run: pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
     python examples/sentiment_data.py vaderSentiment-3.3.2.tar.gz sentiment

Writes train.csv and test.csv (text,label: 1 is friendly) and texts.txt, every sentence of the package but those of the
test. Sentences were rated from -4 to 4 by twenty people each (Hutto and Gilbert, 2014); those within 0.5 of neutral are
left out. The texts are quoted snippets of others: use them, do not publish them.
"""

import csv
import hashlib
import io
import sys
import tarfile
from pathlib import Path

ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
FILMS, OTHERS = "movieReviewSnippets", ("amazonReviewSnippets", "nytEditorialSnippets", "tweets")
UNCLEAR, TEST = 0.5, 1 / 7


def rated(inner: tarfile.TarFile, name: str) -> dict[str, float]:
    """Sentence -> mean rating; a sentence that comes twice counts once."""
    text = inner.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt").read().decode("latin-1")
    rows = (line.rstrip("\r").split("\t") for line in text.split("\n") if line.strip())
    return {sentence.strip(): float(score) for _, score, sentence in rows}


def is_test(sentence: str) -> bool:
    """A seventh of all sentences, always the same ones."""
    return int(hashlib.sha256(sentence.encode()).hexdigest()[:8], 16) < TEST * 16**8


def main(package: Path, folder: Path) -> None:
    with tarfile.open(package) as outer:
        (member,) = [m for m in outer if m.name.endswith(ARCHIVE)]
        with tarfile.open(fileobj=io.BytesIO(outer.extractfile(member).read())) as inner:
            films, others = rated(inner, FILMS), [rated(inner, name) for name in OTHERS]
    folder.mkdir(parents=True, exist_ok=True)
    for split, wanted in (("train", False), ("test", True)):
        rows = [(s, int(score > 0)) for s, score in films.items() if is_test(s) == wanted and abs(score) >= UNCLEAR]
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
        print(f"{folder / split}.csv: {len(rows):,} reviews, {sum(label for _, label in rows):,} friendly")
    texts = [s for s in films if not is_test(s)] + [s for other in others for s in other]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    print(f"{folder / 'texts.txt'}: {len(texts):,} sentences")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2])) if len(sys.argv) == 3 else print(__doc__)
