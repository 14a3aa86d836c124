"""Attaching to libraries that are test doubles of Horovod."""

import shutil
import subprocess
from pathlib import Path

import pytest
from interpreter import run_apart

SOURCE = Path(__file__).resolve().parent / "doubles" / "horovod_double.cc"
# The doubles come before Horovod, whose tables they would use otherwise.
PROGRAM = """
import ctypes, sys
doubles = [ctypes.CDLL(path) for path in sys.argv[1:3]]
import horovod.torch
from horovod_partial import _attach
for path in sys.argv[1:]:
    _attach.attach(path, waits_are_told=False)
for double in doubles:
    double.double_run_cycle()
print([double.double_calls() for double in doubles])
"""


@pytest.fixture
def libraries(tmp_path: Path) -> list[Path]:
    """Two libraries, and the first one under another name."""
    first, second, same = (tmp_path / name for name in ("first.so", "second.so", "same.so"))
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-o", str(first), str(SOURCE)], check=True, timeout=60)
    shutil.copy(first, second)
    same.symlink_to(first)
    return [first, second, same]


def test_each_table_keeps_its_own_functions(libraries: list[Path]) -> None:
    """Two libraries with tables of their own, one of them attached twice: each function is called once, in its own."""
    done = run_apart(PROGRAM, *map(str, libraries))
    assert (done.stdout, done.returncode) == ("[10, 10]\n", 0), done.stderr


COLLECTING = """
import gc
import torch
import horovod_partial.torch as hvd

hvd.init()
handle = hvd.partial_allreduce_async(torch.ones(1), name="bucket", sync="solo")
hvd.synchronize(handle)
polled = []
gc.callbacks.append(lambda phase, info: polled.append(hvd.poll(handle)))
kept = [{} for _ in range(1000)]  # so that none is left to be used again, and new ones count
gc.freeze()
gc.set_threshold(1)
statistics = hvd.partial_stats()
gc.disable()
print(statistics["bucket"]["rounds"], all(polled))
"""


def test_garbage_may_be_collected_while_statistics_are_made() -> None:
    """What the collection of garbage runs may use the bucket that the statistics are about."""
    done = run_apart(COLLECTING)
    assert (done.stdout, done.returncode) == ("1 True\n", 0), done.stderr
