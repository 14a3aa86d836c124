"""Which ends of a process are failures."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
from interpreter import run_apart

from horovod_partial.runtime import failure
from horovod_partial.torch.operations import runtime

PROGRAM = """
import argparse, atexit, sys, threading
from horovod_partial.runtime import failure

failure.watch()
atexit.register(lambda: print("failed" if failure.of_process() else "normal", flush=True))


def caught(code):
    try:
        sys.exit(code)
    except SystemExit as exit:
        assert exit.code == code


def changed(code, other):
    try:
        sys.exit(code)
    except SystemExit as exit:
        exit.code = other
        raise


def in_thread(code):
    thread = threading.Thread(target=sys.exit, args=(code,))
    thread.start()
    thread.join()


"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(None)", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(False)", 0),
        ("sys.exit(1)", 1),
        ("sys.exit(7)", 7),
        ("sys.exit('text')", 1),
        ("sys.exit('')", 1),
        ("sys.exit((1, 2))", 1),
        ("exit()", 0),
        ("exit(3)", 3),
        ("quit(3)", 3),
        ("argparse.ArgumentParser().parse_args(['--unknown'])", 2),
        ("raise RuntimeError", 1),
        ("caught(1)", 0),
        ("caught('text'); sys.exit(0)", 0),
        ("caught(0); sys.exit(1)", 1),
        ("changed(1, 0)", 0),
        ("changed(0, 1)", 1),
        ("in_thread(1)", 0),
    ],
)
def test_ends(end: str, status: int) -> None:
    done = run_apart(PROGRAM + end)
    assert done.returncode == status, done.stderr
    assert done.stdout.split() == ["failed" if status else "normal"], done.stderr
    if "in_thread" in end:
        assert done.stderr == "", "an exit of a thread is silent"


@pytest.mark.parametrize(
    ("exception", "fails"),
    [
        (None, False),
        (RuntimeError(), True),
        (KeyboardInterrupt(), True),
        (SystemExit(), False),
        (SystemExit(0), False),
        (SystemExit(1), True),
        (SystemExit("text"), True),
        (SystemExit(0.0), True),
    ],
)
def test_exceptions(exception: BaseException | None, fails: bool) -> None:
    assert failure.is_failure(exception) == fails


@pytest.mark.parametrize(("code", "delivers"), [(None, True), (0, True), (1, False), ("text", False)])
def test_shutdown_delivers_on_the_way_to_a_normal_end(
    monkeypatch: pytest.MonkeyPatch, code: object, delivers: bool
) -> None:
    done = []
    monkeypatch.setattr(runtime, "_end", lambda **_: done.append("delivered"))
    monkeypatch.setattr(runtime, "_mpi_ops", SimpleNamespace(shutdown=lambda: done.append("down")))
    monkeypatch.setattr(runtime, "core", SimpleNamespace(say_farewell=done.append, end_recording=lambda: None))
    with contextlib.suppress(SystemExit):
        try:
            sys.exit(code)
        finally:
            runtime.shutdown()
    assert done == ["delivered" if delivers else f"it exits with status {code}", "down"]


class Unprintable:
    """A program's own."""

    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("exception", "text"),
    [
        (RuntimeError("no memory\n  left"), "RuntimeError: no memory left"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "it exits with status 3"),
        (SystemExit("bad input"), "it exits with status bad input"),
        (OSError("\udcff \x1b[31m\0"), "OSError: ? ?[31m?"),
        (SystemExit(Unprintable()), "SystemExit"),
    ],
)
def test_a_failure_is_described_in_a_line(exception: BaseException, text: str) -> None:
    assert failure.describe(exception) == text


def test_of_a_long_description_beginning_and_end_are_left() -> None:
    text = failure.describe(RuntimeError("a" * 10**6 + "b"))
    assert len(text) < 2 * failure.MOST_CHARACTERS
    assert text.startswith("RuntimeError: aaa")
    assert text.endswith("ab")
