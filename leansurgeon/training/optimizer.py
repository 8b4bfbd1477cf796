"""One optimizer step: forward, backward, reduce, clip, update; the optimizer with the usual parameter groups, and the
moving average of the weights. Nothing in here waits for the device.

The loss of a step is the sum over everything that was scored, divided by how much was scored, over all micro batches
and all processes together: 1 process or 8, one micro batch or 16, give the same optimization even where token counts
differ.

Two exceptions wait for the device: fp16 (its scaler reads whether a gradient was infinite) and `nan: skip`, which
decides at every step whether to take it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.training import data_loader, distributed
from leansurgeon.training.recipe.schema import Ema, Optim
from leansurgeon.training.schedule import Pace, Plan

if TYPE_CHECKING:
    from accelerate import Accelerator

    from leansurgeon.training.regularize import BatchMixing


# Learned positions and class/distillation tokens under the names of transformers, timm and our own modules. These have
# two or three dimensions, so the rule "no decay below two dimensions" would miss them.
_POSITION_OR_CLASS = re.compile(
    r"(^|\.)(pos_embed|pos_emb|pos_embedding|position_embeddings?|embed_positions|wpe|cls_token|class_token|cls_pos|"
    r"dist_token|distillation_token|reg_token|register_tokens|mask_token)(\.|$)"
)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two groups of the trainable parameters, each tied parameter once: weight decay for matrices, none for
    biases, norms and position/class embeddings.
    """
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 and not _POSITION_OR_CLASS.search(name) else free).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, optim: Optim, *, fused: bool) -> torch.optim.Optimizer:
    """Return the optimizer on `parameter_groups`; `fused` selects the one-kernel form (torch's own, not LAMB)."""
    groups = parameter_groups(model, optim.weight_decay)
    if optim.name == "lamb":
        from timm.optim import Lamb

        # The loop clips the gradient, as with the others.
        return Lamb(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, max_grad_norm=None)
    if optim.name == "sgd":
        return SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=fused or None)
    kind = AdamW if optim.name == "adamw" else Adam
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused or None)


class Average:
    """The moving average of `loaded.model`; `loaded` here is the same with the averaged model in it."""

    def __init__(self, loaded: Loaded, ema: Ema) -> None:
        from timm.utils import ModelEmaV3

        self._ema = ModelEmaV3(loaded.model, decay=ema.decay, use_warmup=ema.warmup)
        self._ema.requires_grad_(False)
        self.loaded = copy.copy(loaded)
        self.loaded.model = self._ema.module

    def update(self, model: nn.Module, done: int) -> None:
        """Update with the weights after `done` steps. The first update copies them; no state but the weights is kept.

        Not timm's `update`: that goes by names, so that a tied weight, which has two, moves twice as fast; and it does
        not take sharded tensors (`distributed`).
        """
        share = 1 - self._ema.get_decay(done)
        means, values = _tensors(self.loaded.model), _tensors(model)
        floating = [name for name, mean in means.items() if mean.is_floating_point()]
        with torch.no_grad():
            torch._foreach_lerp_([means[name] for name in floating], [values[name] for name in floating], share)
            for name in means.keys() - set(floating):
                means[name].copy_(values[name])


def _tensors(model: nn.Module) -> distributed.Tensors:
    """Return parameters and buffers, each once; of sharded ones the shard of this process."""
    return {name: distributed.local_part(tensor) for name, tensor in distributed.list_tensors(model).items()}


@dataclass
class Trainer:
    """What a step needs.

    `wrapped` is `scored` behind DDP if there are several processes, else the same object. Under FSDP2, `scored` and its
    parameters are sharded, and `rehearsal` makes a copy that runs without other processes.
    """

    accelerator: Accelerator
    scored: nn.Module
    wrapped: nn.Module
    optimizer: Any
    pace: Pace
    average: Average | None = None
    mixing: BatchMixing | None = None
    rehearsal: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        self.parameters = [parameter for parameter in self.scored.parameters() if parameter.requires_grad]
        self.scaler = distributed.make_scaler(self.plan.train.precision, self.accelerator.device)

    @property
    def plan(self) -> Plan:
        return self.pace.plan

    def lr(self, step: int) -> float:
        return self.plan.lr(self.pace.place(step))

    def step(self, step: int, batches: list[data_loader.Batch]) -> Tensor:
        """Train on the micro batches of optimizer step `step`.

        Returns loss sum, scored count (both over all processes) and gradient norm before clipping as one tensor `(3,)`
        on the device.
        """
        plan, train, place = self.plan, self.plan.train, self.pace.place(step)
        lr, momentum = plan.lr(place), plan.momentum(place)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            if momentum is not None:
                if "betas" in group:
                    group["betas"] = (momentum, group["betas"][1])
                else:
                    group["momentum"] = momentum
        # Dropout is a function of (seed, step, process) too: no generator state has to be carried from step to step.
        distributed.seed_generators(
            self.accelerator.device, data_loader.dropout_seed(train.seed, step, self.accelerator.process_index)
        )
        alone = plan.processes == 1 and len(batches) == 1
        sums = self._gradients(step, batches, alone)
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not alone:
            # DDP and FSDP2 average over processes, hence the factor `processes`.
            local = [distributed.local_part(gradient) for gradient in gradients]
            torch._foreach_mul_(local, plan.batch * plan.processes / sums[1].clamp(min=1))
        # The norm shows whether the gradients are finite, so it is computed without clipping too. The host does not
        # wait for it.
        norm = torch.nn.utils.get_total_norm(gradients)
        if train.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, train.clip_grad, norm)
        result = torch.cat([sums, distributed.gather(norm).reshape(1)])
        # Skip the step if something is not finite and the recipe, or fp16, tolerates that. Every process sees the same
        # numbers, so all of them decide alike.
        taken = not (train.nan == "skip" or self.scaler) or bool(torch.isfinite(result).all())
        if taken:
            self.scaler.step(self.optimizer) if self.scaler else self.optimizer.step()
        if self.scaler:
            self.scaler.update()
        if self.average and taken:
            self.average.update(self.scored.model, step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _gradients(self, step: int, batches: list[data_loader.Batch], alone: bool) -> Tensor:
        """Run forward and backward of all micro batches; return loss sum and count `(2,)` over all processes.

        DDP reduces gradients with the last micro batch only; FSDP2 with each, since unsharded gradients in between
        would take the memory that it saves.
        """
        sums, always = None, distributed.is_split(self.wrapped)
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            if self.mixing:
                batch = self.mixing(batch, self.plan.position(step) // self.plan.epoch_samples, step)
            with self.accelerator.no_sync(self.wrapped) if left and not always else nullcontext():
                score = self.wrapped(batch)
                # With one process and one micro batch, the count is known before backward. Otherwise a constant keeps
                # the gradients at a usual size until the count of the whole step is known.
                loss = score.loss_sum / (score.loss_count.clamp(min=1) if alone else self.plan.batch)
                self.accelerator.backward(self.scaler.scale(loss) if self.scaler else loss)
            part = torch.stack([score.loss_sum.detach(), score.loss_count])
            sums = part if sums is None else sums + part
        return distributed.all_reduce(sums, self.accelerator)
