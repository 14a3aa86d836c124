"""Whether this process ends by a failure: by an exception, or with an exit status other than 0."""

from __future__ import annotations

import builtins
import functools
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

MOST_CHARACTERS = 400  # of what other ranks are told of a failure
_failure: str | None = None  # what ends this process


def is_failure(exception: BaseException | None) -> bool:
    """Whether this exception ends a process with an exit status other than 0, where nothing catches it."""
    if isinstance(exception, SystemExit):
        code = exception.code
        return code is not None and not (isinstance(code, int) and code == 0)  # the interpreter prints other objects
    return exception is not None


def of_process() -> str | None:
    """By what failure this process ends, or None; for exit handlers."""
    last = getattr(sys, "last_value", None)  # set whatever the excepthook is
    return _failure or (describe(last) if last is not None else None)


def describe(exception: BaseException) -> str:
    """An exception in one line of valid UTF-8, of a long one the beginning and the end."""
    try:
        if isinstance(exception, SystemExit):
            text = f"it exits with status {exception.code}"
        else:
            text = "".join(traceback.format_exception_only(exception))
    except Exception:  # noqa: BLE001 (a program's own `__str__` may raise anything)
        text = type(exception).__name__
    text = " ".join(text.split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return (
        text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS // 2]} ... {text[-MOST_CHARACTERS // 2 :]}"
    )


@functools.cache
def watch() -> None:
    """Begin to watch how this process ends. A second call does nothing."""
    sys.excepthook = _noticing(sys.excepthook)
    sys.exit = _noticed(sys.exit)
    quitter: Any = type(getattr(builtins, "exit", None))  # of `exit` and `quit`, where the module site has made them
    if quitter.__name__ == "Quitter":
        quitter.__call__ = _noticed(quitter.__call__)


def ends(exception: BaseException) -> None:
    """This exception, which is a failure, ends the process."""
    global _failure
    _failure = describe(exception)


def _noticing(previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(kind: type[BaseException], exception: BaseException, trace: Any) -> None:
        ends(exception)
        previous(kind, exception, trace)

    return hook


class _Exit(SystemExit):
    """A SystemExit that notices whether it ends the process. No hook tells of that, and exit handlers come later.

    The interpreter asks for the code when it ends the process, and then no function of the program runs any more. If the
    program catches the exception, one of its functions asks for the code, or nobody does.
    """

    @property
    def code(self) -> Any:
        if sys._getframe().f_back is None and is_failure(exit := SystemExit(super().code)):
            ends(exit)
        return super().code

    @code.setter
    def code(self, value: Any) -> None:
        SystemExit.__dict__["code"].__set__(self, value)


def _noticed(exit: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises SystemExit, made to raise one that notices."""

    @functools.wraps(exit)
    def noticed(*args: Any) -> None:
        try:
            exit(*args)
        except SystemExit as error:
            if threading.current_thread() is not threading.main_thread():
                raise  # it ends the thread
            raise _Exit(*error.args) from None

    return noticed
