"""Hooks on a model's modules that are removed when the work is done or fails. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn


class Hooks(ExitStack):
    """Context manager for hooks. All are removed at its end, also on an error, or if adding one failed:

    with Hooks() as hooks:
        hooks.after(module, note)
        model(**batch)
    """

    def before(self, module: nn.Module, hook: Callable[..., Any], **options: bool) -> None:
        """Call `hook(module, args)` before the forward pass of a module; what it returns replaces `args`."""
        self.callback(module.register_forward_pre_hook(hook, **options).remove)

    def after(self, module: nn.Module, hook: Callable[..., Any], **options: bool) -> None:
        """Call `hook(module, args, output)` after the forward pass of a module; what it returns replaces the output."""
        self.callback(module.register_forward_hook(hook, **options).remove)

    def gradient(self, parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        """Call `hook(parameter)` once the gradient of a parameter is accumulated."""
        self.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
