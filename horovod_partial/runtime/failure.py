"""Finds out whether this process ends by a failure: by an exception, or with an exit status other than 0."""

from __future__ import annotations

import builtins
import functools
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

MOST_CHARACTERS = 400  # the most characters of a text that tells other ranks of a failure
_failure: str | None = None  # a text about the failure that ends this process; None if there was no failure


def is_failure(exception: BaseException | None) -> bool:
    """Return whether this exception ends a process with an exit status other than 0, if nothing catches it."""
    if isinstance(exception, SystemExit):
        code = exception.code
        # A process whose exit code is neither None nor an int ends with status 1.
        return code is not None and not (isinstance(code, int) and code == 0)
    return exception is not None


def of_process() -> str | None:
    """Return a text about the failure that ends this process, or None. For exit handlers."""
    last = getattr(sys, "last_value", None)  # Python sets `sys.last_value` before it calls `sys.excepthook`
    return _failure or (describe(last) if last is not None else None)


def describe(exception: BaseException) -> str:
    """Describe an exception in one line of valid UTF-8. A long text is cut in the middle."""
    try:
        if isinstance(exception, SystemExit):
            text = f"it exits with status {exception.code}"
        else:
            text = "".join(traceback.format_exception_only(exception))
    except Exception:  # noqa: BLE001 (a program's own `__str__` may raise anything)
        text = type(exception).__name__
    text = " ".join(text.split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS // 2]} ... {text[-MOST_CHARACTERS // 2 :]}"
    return text


@functools.cache
def watch() -> None:
    """Begin to watch how this process ends. A second call does nothing."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], exception: BaseException, trace: Any) -> None:
        ends(exception)
        previous(kind, exception, trace)

    sys.excepthook = hook
    sys.exit = _noticed(sys.exit)
    quitter: Any = type(getattr(builtins, "exit", None))  # the class of `exit` and `quit`; `python -S` has neither
    if quitter.__name__ == "Quitter":
        quitter.__call__ = _noticed(quitter.__call__)


def ends(exception: BaseException) -> None:
    """Note that an exception ends the process by a failure. Exit handlers send a text about it to other ranks."""
    global _failure
    _failure = describe(exception)


class _Exit(SystemExit):
    """A SystemExit that notices when it ends the process. Python has no hook for that before the exit handlers run.

    The interpreter reads `code` when the exception ends the process. At that time no function of the program is running.
    If the program catches the exception, `code` is read by one of its functions, or never.
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
    """Wrap a function that raises SystemExit. The wrapper raises `_Exit`, which notices when it ends the process."""

    @functools.wraps(exit)
    def noticed(*args: Any) -> None:
        try:
            exit(*args)
        except SystemExit as error:
            if threading.current_thread() is not threading.main_thread():
                raise  # outside the main thread, SystemExit ends only the thread
            raise _Exit(*error.args) from None

    return noticed
