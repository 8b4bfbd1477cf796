"""Share the process with the program that calls a Python function: one call works at a time and leaves the process as
it was, and errors name arguments instead of flags.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

from leansurgeon.errors import LeanSurgeonError, in_words
from leansurgeon.progress import Say, silent

# transformers, timm and torch build, load and save with process-wide settings (verbosity, default precision,
# environment), so two calls would interfere. A call may call another one.
one = threading.RLock()


def unlock() -> None:
    """Replace the lock in a forked process, which has none of the threads that may hold it."""
    global one
    one = threading.RLock()


os.register_at_fork(after_in_child=unlock)


@contextmanager
def leave_process_alone(say: Say) -> Iterator[None]:
    """Wait until no other call runs in this process; afterwards restore environment, random generators, precision and
    Accelerate's state. Reports a wait to `say`.
    """
    if not one.acquire(blocking=False):
        say("Another call of leansurgeon is working in this process; waiting for it to end.")
        one.acquire()
    try:
        with ExitStack() as stack:
            stack.callback(restore_environment, dict(os.environ))
            stack.callback(random.setstate, random.getstate())
            numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
            if numpy is not None:
                stack.callback(numpy.random.set_state, numpy.random.get_state())
            if torch is not None:
                from leansurgeon.measure.costs.precision import allow, forbid_tf32

                stack.callback(torch.set_rng_state, torch.get_rng_state())
                if torch.cuda.is_initialized():
                    stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
                else:  # a GPU may be first used meanwhile
                    stack.callback(torch.cuda.manual_seed_all, torch.initial_seed())
                before = forbid_tf32()
                allow(*before)
                stack.callback(allow, *before)
            stack.callback(restore_accelerate, [dict(state) for state in accelerate_states()])
            yield
    finally:
        one.release()


def restore_environment(before: Mapping[str, str]) -> None:
    """Make the environment variables what they were."""
    for key in [key for key in os.environ if key not in before]:
        del os.environ[key]
    os.environ.update({key: value for key, value in before.items() if os.environ.get(key) != value})


def accelerate_states() -> list[dict[str, Any]]:
    """Return the shared state of Accelerate's classes; empty if it is not loaded."""
    there = sys.modules.get("accelerate.state")
    kinds = ("AcceleratorState", "PartialState", "GradientState")
    return [getattr(there, kind)._shared_state for kind in kinds] if there else []


def restore_accelerate(before: Sequence[Mapping[str, Any]]) -> None:
    """Make Accelerate's shared state what it was, empty if it was not loaded."""
    for i, state in enumerate(accelerate_states()):
        state.clear()
        state.update(before[i] if before else {})


P = ParamSpec("P")
T = TypeVar("T")
FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z0-9-]*)")
# Flags with another name in Python.
NAMES = {"calibrate": "data", "push": "repo"}


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function leave the process as it was, and raise leansurgeon's own errors, which name arguments instead of
    flags.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call_function(*args: P.args, **kwargs: P.kwargs) -> T:
        with own_errors(known), leave_process_alone(silent):
            return function(*args, **kwargs)

    return call_function


@contextmanager
def own_errors(known: Mapping[str, inspect.Parameter]) -> Iterator[None]:
    """Turn errors into leansurgeon's own, which name arguments instead of the command line's flags."""
    try:
        yield
    except LeanSurgeonError as error:
        error.message, error.hint = in_python(error.message, known), error.hint and in_python(error.hint, known)
        error.args = (error.message,)
        raise
    except OSError as error:
        if said := in_words(error):
            raise said from error
        raise


def in_python(text: str, known: Mapping[str, inspect.Parameter]) -> str:
    """Return an error message with arguments in place of flags; flags that the function lacks stay.

    >>> def shrink(data=None, force=False, proof=True, out=None): ...
    >>> in_python("Add --calibrate DATA; --no-proof, --force or -o.", inspect.signature(shrink).parameters)
    'Add data=DATA; proof=False, force=True or out=.'
    """

    def argument(flag: re.Match[str]) -> str:
        """Return the argument for a flag."""
        name = flag[2].replace("-", "_")
        name = name if name in known else NAMES.get(name, name)
        parameter = known.get(name)
        if parameter is None:
            return flag[0]
        return f"{name}={'False' if flag[1] else 'True' if isinstance(parameter.default, bool) else ''}"

    if "private" in known:
        text = text.replace("--public", "private=False")
    said = FLAG.sub(argument, text)
    said = re.sub(r"(?<=\w=) (?=\S)", "", said)  # `data= DATA`
    return re.sub(r"(?<![\w-])-o\b", "out=", said) if "out" in known else said
