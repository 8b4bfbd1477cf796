"""Further training without a teacher: what a user of transformers alone would do to a model that lost layers.

    python examples/healing/plain_trainer.py MODEL TEXT [TEXT ...] -o FOLDER --time 20m

`transformers.Trainer` with AdamW at --lr (5e-5, its default), linear decay after a short warm-up, the next token for
causal models. An encoder without a head gets a fresh one for masked language modelling, which is thrown away again. The
texts are parted as `leansurgeon retrain --data` parts them, so that both leave the same text alone, and --time is that
of the whole command: start-up and saving are in it. --steps trains so many steps instead, however long they take.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse  # noqa: E402 (the clock runs while libraries load)
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, Trainer  # noqa: E402

from leansurgeon.tasks import splits  # noqa: E402
from leansurgeon.tasks.text import corpus  # noqa: E402
from leansurgeon.training.recipe.durations import parse_duration  # noqa: E402

WARMUP = 0.05
LEFT = 4.0  # seconds for the last step, saving and leaving


def main() -> None:
    asked = arguments()
    transformers.set_seed(asked.seed)
    config = AutoConfig.from_pretrained(asked.model)
    causal = config.architectures[0].endswith(("ForCausalLM", "LMHeadModel"))
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    kind = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    model = kind.from_pretrained(asked.model, dtype=torch.float32)
    data = windows(training_text(asked.texts, causal), tokenizer, asked.tokens, causal)
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=not causal)
    settings = transformers.TrainingArguments(
        output_dir=str(asked.out),
        per_device_train_batch_size=asked.batch,
        num_train_epochs=1_000,  # the clock ends it
        learning_rate=asked.lr,
        bf16=asked.bf16,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        seed=asked.seed,
    )
    clock = Length(asked.seconds - LEFT, asked.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr, weight_decay=0.0)
    pace = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: clock.rate())
    trainer = Trainer(
        model,
        settings,
        data_collator=collator,
        train_dataset=data,
        optimizers=(optimizer, pace),
        callbacks=[clock],
    )
    trainer.train()
    (model if causal else model.base_model).save_pretrained(asked.out)
    tokenizer.save_pretrained(asked.out)
    steps = trainer.state.global_step
    print(f"{steps} steps of {asked.batch} x {asked.tokens} tokens, {time.perf_counter() - BEGAN:.0f} s in all")


class Length(transformers.TrainerCallback):
    """Ends the training after `steps`, or `seconds` after the script began; says where its schedule stands."""

    def __init__(self, seconds: float, steps: int | None) -> None:
        self.seconds, self.steps, self.step = seconds, steps, 0
        self.first = time.perf_counter() - BEGAN

    def done(self) -> float:
        """Share of the training that is over: of its steps, or of its own time."""
        if self.steps:
            return self.step / self.steps
        return min(1.0, (time.perf_counter() - BEGAN - self.first) / max(1e-9, self.seconds - self.first))

    def rate(self) -> float:
        """Share of the learning rate."""
        return min(max(self.done(), 0.01) / WARMUP, max(1 - self.done(), 0.01) / (1 - WARMUP))

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.first = time.perf_counter() - BEGAN

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.step = state.global_step
        control.should_training_stop = self.done() >= 1


def training_text(names: list[str], causal: bool) -> list[str]:
    """What leansurgeon trains on of these files: the rest is held out by content, block by block or by sentences."""
    texts = corpus.find(names, "text")
    if causal:
        return list(corpus.split_documents({"train": texts})[1]["train"]())
    every = texts.texts()
    rows = splits.split_by_content([*map(splits.hash_text, every)]).rows["train"]
    return ["\n".join(every[row] for row in rows)]


def windows(texts: list[str], tokenizer, tokens: int, causal: bool) -> list[dict[str, torch.Tensor]]:
    """Windows of so many tokens, with [CLS] and [SEP] around each for an encoder."""
    around = [] if causal else tokenizer("")["input_ids"]
    room = tokens - len(around)
    found = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids) - room + 1, room):
            piece = ids[start : start + room]
            found.append({"input_ids": torch.tensor([*around[:1], *piece, *around[1:]])})
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--time", default="20m")
    parser.add_argument("--steps", type=int, help="in place of --time")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    parser.add_argument("--batch", type=int, default=4, help="windows of a step")
    parser.add_argument("--bf16", action="store_true", help="matrix products in bf16")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.seconds = parse_duration(asked.time).seconds
    return asked


if __name__ == "__main__":
    main()
