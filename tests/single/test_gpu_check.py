"""tools/gpu_check.py without a GPU: which steps run, what is written down of them, and what is blanked in NCCL's library."""

import hashlib
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from interpreter import run_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, whose state is in a folder of the test's own."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import gpu_check

    state = tmp_path / "state"
    monkeypatch.setattr(gpu_check, "STATE", state)
    monkeypatch.setattr(gpu_check, "MPS_FOLDER", state / "mps")
    monkeypatch.setattr(gpu_check, "ARCHIVES", state / "archives")
    monkeypatch.setattr(gpu_check, "NCCL_LIBRARY", state / "nccl" / "libnccl.so.2")
    return gpu_check


def run(gpu_check: ModuleType, *steps: str, seconds: float = 60.0) -> tuple[int, dict[str, dict[str, object]]]:
    results = gpu_check.STATE / "results.json"
    status = gpu_check.run(steps, results, seconds)
    return status, json.loads(results.read_text())["steps"]


def test_the_shell_entry() -> None:
    subprocess.run(["sh", "-n", str(ROOT / "tools" / "gpu_check.sh")], check=True)
    told = run_command(
        ROOT / "tools" / "gpu_check.sh", "--help", env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    )
    assert told.returncode == 0
    assert "collect" in told.stdout


def test_parts_and_steps(gpu_check: ModuleType) -> None:
    assert gpu_check.steps_of("c.latency,a") == ["c.latency", "a.policies"]
    assert set(gpu_check.steps_of("build,a,b,c,d,e,profile")) == set(gpu_check.STEPS)
    of_all = {*gpu_check.steps_of("build"), *gpu_check.SHARES}
    assert set(gpu_check.steps_of("build,a,b,c,d,e")) == of_all
    with pytest.raises(gpu_check.SetupError, match="no part 'z'"):
        gpu_check.steps_of("a,z")


def test_a_profile_comes_behind_a_build(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in gpu_check.STEPS:
        monkeypatch.setitem(gpu_check.STEPS, name, lambda step: ran.append(step.name))
    assert gpu_check.main(["profile", "--results", str(gpu_check.STATE / "results.json")]) == 0
    loads = [f"profile.{load}" for load in ("resnet50", "small", "transformer")]
    assert ran == [*gpu_check.steps_of("build"), *loads, "c.overhead"]


def test_the_tests_that_it_names_are_there(gpu_check: ModuleType) -> None:
    for name in (*gpu_check.NEW_TESTS, *gpu_check.TESTS):
        file, _, function = name.partition("::")
        assert f"def {function}" in (ROOT / "tests" / "parallel" / f"test_{file}").read_text()


def test_a_failure_is_written_down_and_the_next_goes_on(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('it says so'); sys.exit(3)"
    monkeypatch.setitem(gpu_check.STEPS, "fails", lambda step: step.run(sys.executable, "-c", program))
    monkeypatch.setitem(gpu_check.STEPS, "measures", lambda step: step.json.write_text('{"ratio": 1.5}'))
    status, steps = run(gpu_check, "fails", "measures")
    assert status == 1
    assert (steps["fails"]["passed"], steps["fails"]["reason"]) == (False, "ended with status 3")
    assert str(steps["fails"]["output"]).endswith("it says so\n")
    assert (steps["measures"]["passed"], steps["measures"]["figures"]) == (True, {"ratio": 1.5})
    status, steps = run(gpu_check, "measures")  # what an earlier call has found stays
    assert (status, steps["fails"]["passed"]) == (0, False)


def test_a_step_hands_on_the_time_that_it_does_not_take(gpu_check: ModuleType) -> None:
    steps = list(gpu_check.SHARES)
    total = sum(gpu_check.SHARES.values())
    assert gpu_check.seconds_for(steps[0], steps[1:], 2 * total) == pytest.approx(2 * gpu_check.SHARES[steps[0]])
    assert gpu_check.seconds_for(steps[-1], [], 7.0) == 7.0
    assert gpu_check.seconds_for("build.horovod", steps, 560.0) == 560.0  # nothing else runs without it
    left = 560.0
    for number, step in enumerate(steps):  # each takes all that it may: the last one still gets its share
        seconds = gpu_check.seconds_for(step, steps[number + 1 :], left)
        assert seconds == pytest.approx(560.0 * gpu_check.SHARES[step] / total)
        left -= seconds
    assert left == pytest.approx(0.0, abs=1e-6)


# Measures something, and then goes on for ever.
MEASURES = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text('{"ratio": 1.5}')
time.sleep(600)
"""


def test_what_a_step_has_measured_is_kept_before_it_ends(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt, too, which ends what the step has started, and all later steps."""
    results = gpu_check.STATE / "results.json"

    def found() -> dict[str, object]:
        return json.loads(results.read_text())["steps"]["measures"]

    def interrupt_when_measured(step: Any) -> None:
        keep = step.look

        def look(step: Any) -> None:
            keep(step)
            if "figures" in found():
                assert (found()["passed"], found()["reason"]) == (False, "it has not ended")
                os.kill(os.getpid(), signal.SIGTERM)

        step.look = look
        step.run(sys.executable, "-c", MEASURES, step.json)

    before = signal.signal(signal.SIGTERM, gpu_check.interrupt)
    try:
        monkeypatch.setitem(gpu_check.STEPS, "measures", interrupt_when_measured)
        status, steps = run(gpu_check, "measures", "build.nccl")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (status, list(steps)) == (130, ["measures"])
    assert (steps["measures"]["reason"], steps["measures"]["figures"]) == ("it was interrupted", {"ratio": 1.5})


def test_mps_is_started_and_ended_where_it_is_installed(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a script in place of NVIDIA's program, which needs a driver."""
    notes = tmp_path / "notes"
    with gpu_check.multi_process_service() as variables:
        assert variables == {}
    script = tmp_path / "bin" / gpu_check.MPS
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\n[ "$1" ] || read word\necho $1 $word $CUDA_MPS_PIPE_DIRECTORY >> {notes}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    with gpu_check.multi_process_service() as variables:
        folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert notes.read_text() == f"-d {folder}\n"
    assert notes.read_text() == f"-d {folder}\nquit {folder}\n"


def test_the_time_is_for_all(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command has started in a session of its own, as `horovodrun` does, ends with it."""
    child = "print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
    program = f"import subprocess, time\n{child}\ntime.sleep(60)"
    monkeypatch.setitem(gpu_check.STEPS, "hangs", lambda step: step.run(sys.executable, "-c", program))
    begin = time.monotonic()
    monkeypatch.setitem(gpu_check.SHARES, "hangs", 1e6)
    status, steps = run(gpu_check, "hangs", "build.nccl", seconds=2.0)
    assert time.monotonic() - begin < 30
    assert status == 1
    assert steps["hangs"]["reason"] == "did not end in time"
    assert steps["build.nccl"]["reason"] == "no time was left for it"
    pid = str(steps["hangs"]["output"]).split()[-1]
    state = Path("/proc") / pid / "stat"
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def code(gpu_check: ModuleType, *entries: tuple[int, int, bytes]) -> bytes:
    """A container of code for GPUs, of kinds, architectures and contents."""
    body = b""
    for kind, architecture, content in entries:
        body += gpu_check.ENTRY.pack(kind, 0, gpu_check.ENTRY.size, len(content), architecture) + content
    return gpu_check.CONTAINER.pack(gpu_check.MAGIC, 1, gpu_check.CONTAINER.size, len(body)) + body


def test_code_for_other_gpus_is_blanked(gpu_check: ModuleType) -> None:
    def library(*contents: bytes) -> bytes:
        kinds = [(2, 80), (2, 90), (1, 90)]
        entries = [(*kind, content) for kind, content in zip(kinds, contents, strict=True)]
        return b"before" + code(gpu_check, *entries) + b"between" + code(gpu_check, *reversed(entries)) + b"behind"

    blanked = bytearray(library(b"older", b"this one", b"text"))
    gpu_check.blank_others(blanked, 90)
    assert blanked == library(bytes(5), b"this one", bytes(4))
    with pytest.raises(gpu_check.SetupError, match="no machine code for sm_75"):
        gpu_check.blank_others(blanked, 75)


def test_nccl_is_joined_from_its_pieces(gpu_check: ModuleType, tmp_path: Path) -> None:
    library = b"library" * 100
    packed = lzma.compress(library)
    carried = tmp_path / "carried"
    carried.mkdir()
    about = {"pieces": ["piece.00", "piece.01"], "sha256": hashlib.sha256(library).hexdigest()}
    (carried / "nccl.json").write_text(json.dumps(about))
    (carried / "piece.00").write_bytes(packed[:50])
    gpu_check.store(carried)
    _, steps = run(gpu_check, "build.nccl")
    assert steps["build.nccl"]["reason"] == "pieces of NCCL have not been carried yet: piece.01"
    (carried / "piece.00").rename(carried / "piece.01")
    (carried / "piece.01").write_bytes(packed[50:])
    gpu_check.store(carried)
    status, steps = run(gpu_check, "build.nccl")
    assert (status, gpu_check.NCCL_LIBRARY.read_bytes()) == (0, library)
    (carried / "nccl.json").write_text(json.dumps(about | {"sha256": "0"}))
    gpu_check.store(carried)
    assert run(gpu_check, "build.nccl")[0] == 1


def test_several_ranks_need_a_newer_nccl(gpu_check: ModuleType) -> None:
    status, steps = run(gpu_check, "b.2")
    assert status == 1
    assert "NCCL 2.30 or newer" in str(steps["b.2"]["reason"])
