"""The process belongs to whoever calls a function from Python: one call works in it at a time and leaves it as it was,
and errors speak of arguments instead of flags.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

from leansurgeon.errors import LeanSurgeonError, in_words
from leansurgeon.progress import Say, silent

# Libraries below build, load and save by settings of the whole process (verbosity, default precision, environment), so
# that two calls would meet there. A call may call another one.
one = threading.RLock()


def unlock() -> None:
    """A forked process has none of the threads that may have held the lock."""
    global one
    one = threading.RLock()


os.register_at_fork(after_in_child=unlock)


@contextmanager
def leave_process_alone(say: Say) -> Iterator[None]:
    """Wait until no other call works in this process; afterwards its environment, generators, precision and state of
    Accelerate are what they were. `say` is told of a wait.
    """
    if not one.acquire(blocking=False):
        say("Another call of leansurgeon is working in this process; waiting for it to end.")
        one.acquire()
    try:
        with ExitStack() as stack:
            for keep in (environment, generators, precision, accelerate):
                stack.callback(keep())
            yield
    finally:
        one.release()


def environment() -> Callable[[], None]:
    """Puts the environment variables back."""
    before = dict(os.environ)

    def restore() -> None:
        for key in [key for key in os.environ if key not in before]:
            del os.environ[key]
        os.environ.update({key: value for key, value in before.items() if os.environ.get(key) != value})

    return restore


def generators() -> Callable[[], None]:
    """Puts the generators of Python, numpy and torch back; of torch also those of GPUs that start meanwhile."""
    stack, numpy, torch = ExitStack(), sys.modules.get("numpy"), sys.modules.get("torch")
    stack.callback(random.setstate, random.getstate())
    if numpy is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())
    if torch is not None:
        seed, gpus = torch.initial_seed(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        stack.callback(lambda: torch.cuda.set_rng_state_all(gpus) if gpus else torch.cuda.manual_seed_all(seed))
    return stack.close


def precision() -> Callable[[], None]:
    """Puts back whether products may be rounded to TF32."""
    if "torch" not in sys.modules:
        return lambda: None
    from leansurgeon.measure.costs.precision import allow, forbid_tf32

    before = forbid_tf32()
    allow(*before)
    return lambda: allow(*before)


def accelerate() -> Callable[[], None]:
    """Puts Accelerate's state back, which all of its objects in this process share; none where it was not loaded."""

    def shared() -> list[dict[str, Any]]:
        """The states themselves."""
        there = sys.modules.get("accelerate.state")
        kinds = ("AcceleratorState", "PartialState", "GradientState")
        return [getattr(there, kind)._shared_state for kind in kinds] if there else []

    before = list(map(dict, shared()))

    def restore() -> None:
        for i, state in enumerate(shared()):
            state.clear()
            state.update(before[i] if before else {})

    return restore


P = ParamSpec("P")
T = TypeVar("T")
FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z0-9-]*)")
# Flags that have another name in Python.
NAMES = {"calibrate": "data", "push": "repo"}


def public(function: Callable[P, T]) -> Callable[P, T]:
    """A function that leaves the process as it was, whose errors are leansurgeon's own and name arguments where the
    command line names flags.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call_function(*args: P.args, **kwargs: P.kwargs) -> T:
        with own_errors(known), leave_process_alone(silent):
            return function(*args, **kwargs)

    return call_function


@contextmanager
def own_errors(known: Mapping[str, inspect.Parameter]) -> Iterator[None]:
    """Errors are leansurgeon's own, and name arguments where those of the command line name flags."""
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
    """A message of the commands with arguments in place of flags; flags that the function lacks stay.

    >>> def shrink(data=None, force=False, proof=True, out=None): ...
    >>> in_python("Add --calibrate DATA; --no-proof, --force or -o.", inspect.signature(shrink).parameters)
    'Add data=DATA; proof=False, force=True or out=.'
    """

    def argument(flag: re.Match[str]) -> str:
        """The argument that a flag stands for."""
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
