"""The training of one arm of a comparison, done again with plain transformers.Trainer: the same samples, steps, batch
and learning rate, on one device, and no teacher.

    python examples/comparisons/plain_trainer.py START RUN -o OUT --seed 0

START is the folder that the arm began with (runs/NAME/starts/ARM), RUN the folder of its training (runs/NAME/ARM-s0).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

from leansurgeon import tasks
from leansurgeon.reading.cache_folder import cache_folder


def main() -> None:
    asked = arguments()
    recipe = yaml.safe_load((asked.run / "recipe.yaml").read_text())
    steps = json.loads((asked.run / "summary.json").read_text())["steps"]
    name, train = recipe["task"].pop("name"), recipe["train"]
    task = tasks.make(name, recipe["task"])
    task.prepare(cache_folder(), asked.start, workers=1, say=print)
    labels = task.model_overrides()  # how many classes
    causal = task.head == "causal-lm"
    model = (AutoModelForCausalLM if causal else AutoModelForSequenceClassification).from_pretrained(
        asked.start, dtype=torch.float32, **({} if causal else {"num_labels": labels["num_labels"]})
    )
    settings = TrainingArguments(
        str(asked.out), seed=asked.seed, max_steps=steps, per_device_train_batch_size=train["batch"],
        learning_rate=train["optim"]["lr"], lr_scheduler_type="cosine", warmup_steps=max(1, round(0.05 * steps)),
        weight_decay=train["optim"].get("weight_decay", 0.0), adam_beta2=train["optim"]["betas"][1],
        bf16=train.get("precision") == "bf16", use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True, report_to=[], save_strategy="no", prediction_loss_only=causal,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=samples(task, "train"), data_collator=pad)
    began, clock = time.process_time(), time.perf_counter()
    trainer.train()
    spent, passed = time.process_time() - began, time.perf_counter() - clock
    found = {"steps": steps, "seed": asked.seed, "processor_seconds": round(spent, 1), "seconds": round(passed, 1)}
    test = samples(task, "test")
    if causal:
        found["perplexity"] = math.exp(trainer.evaluate(test)["eval_loss"])
        trainer.save_model(str(asked.out))
    else:
        said = trainer.predict(test)
        found["accuracy"] = float((said.predictions.argmax(-1) == said.label_ids).mean())
    print(json.dumps(found))


def samples(task: tasks.Task, split: str) -> list[dict[str, torch.Tensor]]:
    """The samples of a split one by one, as `leansurgeon` batches them."""
    batches = (task.batch(split, np.array([i]), seed=0, epoch=0) for i in range(task.size(split)))
    return [{key: value[0] for key, value in batch.items() if key[0] != "_"} for batch in batches]


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch of samples, as long as the longest."""
    return {
        key: pad_sequence([row[key] for row in rows], batch_first=True) if rows[0][key].ndim else
        torch.stack([row[key] for row in rows]) for key in rows[0]
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("start", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
