"""Hooks on a model's modules that are removed when the work is done or fails. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Hooks:
    """Context manager for hooks. All are removed at its end, also on an error, or if adding one failed:

    with Hooks() as hooks:
        hooks.after(module, note)
        model(**batch)
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def before(self, module: nn.Module, hook: Callable[..., Any], **options: bool) -> None:
        """Call `hook(module, args)` before the forward pass of a module; what it returns replaces `args`."""
        self._keep(module.register_forward_pre_hook(hook, **options))

    def after(self, module: nn.Module, hook: Callable[..., Any], **options: bool) -> None:
        """Call `hook(module, args, output)` after the forward pass of a module; what it returns replaces the output."""
        self._keep(module.register_forward_hook(hook, **options))

    def gradient(self, parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        """Call `hook(parameter)` once the gradient of a parameter is accumulated."""
        self._keep(parameter.register_post_accumulate_grad_hook(hook))

    def _keep(self, handle: RemovableHandle) -> None:
        self._stack.callback(handle.remove)
