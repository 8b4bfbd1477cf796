"""Run alone in a fresh process: load a folder the documented way, run a forward pass, print the findings as JSON.

Usage: python -I reload_check.py JSON, an object with `result`, `source` (or null), `root`, `inputs` (or null), `kind`,
`room` and `offload`.

`result` and `source` have the keys `folder`; `class` of transformers; `module` of leansurgeon (found in `root`) that
defines the class or registers a timm entry point; `trust` if the folder's own code may run; `tokens` of a model that
takes one length only; `two_texts` for one that reads two texts; `body` for one whose head is missing in its files or
not used; the `pad` token if config.json names none; and the `pooling` of hidden states. Nothing else of leansurgeon is
imported except `reading/pooling.py`, which imports nothing of the package, so a result is seen as a user of plain
transformers or timm sees it.

One line of JSON describes the result (`{"result": ...}`). If there is a source, the result is freed, the source is
loaded in the same way and run on the same inputs, and a second line compares both (`{"source": ...}`).

`inputs` is a safetensors file of batches (`0.input_ids`, `0.attention_mask`, ..., `0.labels`); without it a small
example is made. `kind` says how labels are scored: `causal-lm` (those of the next position) or `plain`.

If the weights exceed `room` bytes, they are read from disk for each use (accelerate's disk offload; the outputs are the
same), so that a model that was cut block by block is never whole in memory here either. `offload` is the folder for
weights that the library has to write for that.
"""

import gc
import importlib.util
import json
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch

ROOM = 2**26  # output values kept for the comparison (256 MiB)
MOST_PAIRED = 2048  # samples whose pairwise similarities are compared


def load_timm(folder: Path, module: str | None):
    """Load the timm model of the folder; return it with an account of missing and unexpected tensors and the loader."""
    import timm
    from safetensors import safe_open

    if module:
        importlib.import_module(module)
    # create_model loads strictly; the keys are compared again because pretrained loading may filter them.
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    built = model.state_dict()
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = set(file.keys())
        read = file.get_tensor  # one at a time, so that memory holds the model only once
        differing = [k for k in sorted(stored & set(built)) if not torch.equal(read(k).float(), built[k].float())]
    account = {
        "missing": sorted(set(built) - stored) + differing,
        "unexpected": sorted(stored - set(built)),
        "loaded_with": "timm.create_model" + (f" after `import {module}`" if module else ""),
    }
    return model, account


def load_transformers(folder: Path, config: dict, how: dict, offload: dict):
    """Load the transformers model of the folder; return it with an account like that of `load_timm`.

    `offload` are arguments that leave weights on disk.
    """
    import transformers

    name, trusted = how["class"], how.get("trust", False)
    remote = config.get("auto_map", {}) if trusted else {}
    auto = next((a for a, full in remote.items() if full.endswith("." + name)), None)
    home = importlib.import_module(how["module"]) if "module" in how else transformers
    cls = getattr(home, auto or name)
    torch.manual_seed(0)  # missing weights are drawn equally for the result and its source
    model, info = cls.from_pretrained(
        folder, output_loading_info=True, trust_remote_code=trusted, dtype=torch.float32, **offload
    )
    account = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(map(str, info["mismatched_keys"])),
        "loaded_with": f"{home.__name__}.{cls.__name__}.from_pretrained"
        + (", trust_remote_code=True" if trusted else ""),
    }
    if getattr(model.config, "pad_token_id", None) is None and how.get("pad") is not None:
        model.config.pad_token_id = how["pad"]
    return model.eval(), account


def run(model, batches: list, kind: str, pooling) -> tuple[dict, list]:
    """Return sums of the scores over all batches, and outputs (rows, values) of real tokens as far as `ROOM` allows.

    The sums include `samples` (loss, labels, correct answers of each) and, if labels are continuous or multi-label
    marks, `valued` (samples, 2, outputs): outputs beside labels.
    """
    rows, pooled, samples, valued, room = [], [], [], [], ROOM
    shape, finite = [], True
    for batch in batches:
        labels = batch.get("labels")
        with torch.no_grad():
            if hasattr(model, "main_input_name"):
                said = model(**{key: value for key, value in batch.items() if key != "labels"})
                predicts = "logits" in said
                output = said.logits if predicts else said[0]  # the last hidden states of a headless model
            else:  # timm
                output, predicts = model(batch["pixel_values"]), True
        output = output.float()
        finite &= bool(torch.isfinite(output).all())
        shape = list(output.shape)
        mask = batch.get("attention_mask")
        real = mask.bool() if mask is not None and output.dim() == 3 and mask.shape == output.shape[:2] else None
        classes = labels is not None and not labels.is_floating_point()
        if classes and output.dim() == labels.dim() + 1 and int(labels.max()) < output.shape[-1]:
            logits, wanted = (output[:, :-1], labels[:, 1:]) if kind == "causal-lm" else (output, labels)
            flat, size = logits.flatten(0, -2), (len(wanted), -1)
            losses = torch.nn.functional.cross_entropy(flat, wanted.flatten(), reduction="none", ignore_index=-100)
            parts = (losses, wanted.flatten() != -100, flat.argmax(-1) == wanted.flatten())
            samples += torch.stack([part.double().view(size).sum(1) for part in parts], dim=1).tolist()
        elif labels is not None and output.dim() == 2 and labels.numel() == output.numel():
            valued += torch.stack([output, labels.view_as(output)], dim=1).tolist()
        if output.dim() == 3 and not predicts:  # sentence embeddings, pooled as users pool them
            pooled.append(pooling.pool(output, mask))
        flat = output[real] if real is not None else output.flatten(0, -2)
        flat = flat[: room // flat.shape[-1]]
        room -= flat.numel()
        rows.append(flat)
    loss, count, right = (sum(sample[i] for sample in samples) for i in range(3))
    sums = {"loss_sum": float(loss), "count": int(count), "right": int(right), "output": shape, "finite": finite}
    sums |= {"samples": samples, "valued": valued}
    return sums, [torch.cat(rows), torch.cat(pooled) if pooled else torch.zeros(0, 1)]


def example(model, how: dict) -> dict:
    """Make one small input of the model's kind."""
    config = model.config
    if model.main_input_name == "pixel_values":
        return {"pixel_values": noise(1, config.num_channels, config.image_size, config.image_size)}
    if model.main_input_name == "input_values":
        return {"input_values": noise(4, 16, config.input_size)}
    room = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 64
    tokens = how.get("tokens") or int(min(64, room - room // 4))  # some of the first positions may be unused
    # Skip the first eighth of the vocabulary, where special tokens (padding, end) usually are.
    ids = torch.randint(config.vocab_size // 8, config.vocab_size, (1, tokens), generator=seed_draws())
    inputs = {"input_ids": ids}
    if how.get("two_texts"):
        inputs["input_ids_2"] = ids.flip(1)
    if getattr(config, "is_encoder_decoder", False):
        end = config.eos_token_id  # classifiers read the hidden state at the end token
        ids[:, -1] = end[0] if isinstance(end, list) else end
        inputs["decoder_input_ids"] = ids.flip(1) if "Sequence" not in type(model).__name__ else ids
    if type(model).__name__.endswith("ForMultipleChoice"):  # (batch, choices, tokens)
        inputs["input_ids"] = torch.stack([ids, ids.flip(1)], dim=1)
    return inputs


def noise(*shape: int):
    """Draw standard normal values of this shape, the same in every process."""
    return torch.randn(*shape, generator=seed_draws())


def seed_draws():
    """Return a generator with the same seed in every process."""
    return torch.Generator().manual_seed(0)


def examine_folder(how: dict, asked: dict, offload: dict | None = None) -> tuple[dict, list]:
    """Load and run a model; return what that shows, and its outputs (see `run`).

    `offload` are the library's arguments for weights that stay on disk; by default they are used if the files may need
    more than `room` bytes in fp32.
    """
    folder = Path(how["folder"])
    config = json.loads((folder / "config.json").read_text())
    timm = "architecture" in config and "model_type" not in config
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if offload is None and not timm and 2 * stored > asked["room"]:
        beside = {"device_map": "auto", "max_memory": {"cpu": asked["room"]}, "offload_folder": asked["offload"]}
        with suppress(Exception):  # fails, for instance, for a class that uses weights without calling their module
            return examine_folder(how, asked, beside)
        gc.collect()  # a real problem will show again below
    model, account = (
        load_timm(folder, how.get("module")) if timm else load_transformers(folder, config, how, offload or {})
    )
    if asked["inputs"]:
        from safetensors.torch import load_file

        by_number = {}  # from names such as `0.input_ids`
        for name, tensor in load_file(asked["inputs"]).items():
            number, _, key = name.partition(".")
            by_number.setdefault(int(number), {})[key] = tensor
        batches = [by_number[number] for number in sorted(by_number)]
    elif timm:
        channels, *sides = config["pretrained_cfg"]["input_size"]
        args = config["model_args"]
        size = args.get("img_size", sides)
        sides = [size, size] if isinstance(size, int) else size
        batches = [{"pixel_values": noise(1, args.get("in_chans", channels), *sides)}]
    else:
        batches = [example(model, how)]
    if asked["inputs"] and type(model).__name__.endswith("ForMultipleChoice"):  # each sentence is the only choice
        batches = [{k: v[:, None] for k, v in batch.items() if k != "labels"} for batch in batches]
    body = model.base_model if how.get("body") else model
    # The module that leansurgeon itself pools with.
    spec = importlib.util.spec_from_file_location("pooling", Path(__file__).parents[2] / "reading" / "pooling.py")
    sys.modules["pooling"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sums, outputs = run(body, batches, asked["kind"], module.Pooling(*how.get("pooling", ())))
    # Some parameters are constants that the library neither saves nor loads (Marian's positions).
    unsaved = {*account["missing"], *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    tied = model.all_tied_weights_keys if offload else {}  # offloaded, each tied name is a tensor of its own
    sizes = {name: p.numel() for name, p in model.named_parameters() if name not in tied}
    lacking = sum(size for name, size in sizes.items() if name in unsaved)
    return account | {"parameters": sum(sizes.values()), "missing_parameters": lacking} | sums, outputs


def differences(source: list, result: list) -> dict:
    """Compare the outputs of two models on the same inputs, as returned by `run`, in fp64."""
    rows, cosine = compare_rows(source[0], result[0])
    figures = rows | {"cosine": float(cosine.mean())}
    if len(source[1]):
        _, pooled = compare_rows(source[1], result[1])
        low = torch.quantile(pooled, 0.01)
        figures["embeddings"] = {"cosine": float(pooled.mean()), "first_percentile": float(low), "samples": len(pooled)}
        figures["cosines"] = pooled.tolist()
        figures["embeddings"] |= neighbours(source[1], result[1])
    return figures


def neighbours(a, b) -> dict:
    """Measure whether embeddings keep their neighbourhoods, which a high mean cosine does not guarantee.

    Returns the rank correlation (Spearman) of the similarities of all pairs, and the share of every sample's ten
    nearest neighbours that are kept.
    """
    from scipy.stats import rankdata

    count = min(len(a), MOST_PAIRED)
    if count < 3:
        return {}
    similar = []
    for x in (a, b):
        x = torch.nn.functional.normalize(x[:count].double(), dim=-1)
        similar.append(x @ x.T)
    above = torch.triu(torch.ones(count, count, dtype=torch.bool), 1)
    ranks = [torch.from_numpy(rankdata(matrix[above]) - 1) for matrix in similar]
    correlation = torch.corrcoef(torch.stack(ranks))[0, 1]
    near, own = min(10, count - 1), torch.eye(count, dtype=torch.bool)
    sets = [matrix.masked_fill(own, -2.0).topk(near, dim=1).indices for matrix in similar]
    kept = (sets[0][:, :, None] == sets[1][:, None, :]).any(-1).double().mean()
    figures = {"rank_correlation": float(correlation), "nearest_kept": float(kept), "nearest": near}
    return {key: value for key, value in figures.items() if value == value}  # drops NaN: all similarities are equal


def compare_rows(a, b) -> tuple[dict, object]:
    """Return largest difference, spread of `a` (standard deviation), relative error, and the cosine of every row."""
    largest, error, size, total, cosines = 0.0, 0.0, 0.0, 0.0, []
    for x, y in zip(a.split(256), b.split(256), strict=True):
        x, y = x.double(), y.double()
        largest = max(largest, float((x - y).abs().max()))
        error += float((x - y).square().sum())
        size += float(x.square().sum())
        total += float(x.sum())
        cosines.append(torch.nn.functional.cosine_similarity(x, y, dim=-1))
    mean = total / a.numel()
    return {
        "rows": len(a),
        "max_difference": largest,
        "spread": max(size / a.numel() - mean**2, 0.0) ** 0.5,
        "relative_error": (error / size) ** 0.5 if size else 0.0,
    }, torch.cat(cosines)


def main() -> None:
    """Load the result, compare it with its source and print the findings as JSON."""
    warnings.filterwarnings("ignore")
    asked = json.loads(sys.argv[1])
    if any("module" in asked[of] for of in ("result", "source") if asked[of]):
        sys.path.insert(0, asked["root"])  # this leansurgeon, not another installed one
    account, outputs = examine_folder(asked["result"], asked)
    print("\n" + json.dumps({"result": account}), flush=True)
    if asked["source"]:
        gc.collect()  # one model in memory at a time
        original, theirs = examine_folder(asked["source"], asked)
        if original["output"] == account["output"]:
            original["differences"] = differences(theirs, outputs)
        print("\n" + json.dumps({"source": original}), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # skips the teardown of torch, which takes a second
