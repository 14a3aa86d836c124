"""Run a function on every rank of a job that `horovodrun` starts, and bring back what rank 0 returned."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from harness.progress import CHANNEL, ProgressBars
from harness.results import Results
from horovod_partial import _build_info as built

Transport = Literal["mpi", "gloo"]
Framework = Literal["torch", "tensorflow"]

_PACKAGES = Path(__file__).resolve().parents[1]  # so that ranks can import this package


class LaunchError(RuntimeError):
    """A job failed or took too long; the message ends with what its ranks have printed."""


def default_transport() -> Transport:
    """MPI where Horovod was built with it and `mpirun` is there, else Gloo."""
    return "mpi" if "mpi" in built.FEATURES and shutil.which("mpirun") else "gloo"


def launch(
    function: Callable[..., Any],
    *,
    ranks: int,
    transport: Transport,
    timeout: float = 1800.0,
    environment: Mapping[str, str] | None = None,
    process_sets: Sequence[Sequence[int]] = (),
    command: Sequence[str] | None = None,
    options: Sequence[str] = (),
    framework: Framework = "torch",
    device: str = "cpu",
    asleep: bool = False,
    on_result: Callable[[Any], None] = lambda _: None,
    **arguments: Any,
) -> Any:
    """Run `function(**arguments)` on `ranks` ranks, with Horovod initialised, and show its progress.

    Args:
        function: at the top level of its script, where the ranks find it by name. A generator function yields what has been
            measured so far; its last result is the whole.
        ranks: how many.
        transport: what Horovod's controller and its reductions use.
        timeout: seconds after which the job is ended.
        environment: variables that the ranks get beside ours.
        process_sets: the ranks of each; if there are any, the function gets them, made by `init`, as `process_sets`.
        command: what starts the ranks, if not `horovodrun`; their program is added to it.
        options: more of that command's own.
        framework: whose Horovod is initialised.
        device: where PyTorch's tensors lie, unless the function says otherwise.
        asleep: whether threads sleep while they wait for Horovod's own operations in PyTorch (see `harness.waiting`).
        on_result: called here with each result of rank 0, while the job goes on. It may miss one that the next has replaced.
        arguments: for the function; they travel as JSON, and so does its result.

    Returns:
        What the function returned, or yielded last, on rank 0.

    Raises:
        LaunchError: a rank failed, or the job did not end in time.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the ranks are ended then, too
    with tempfile.TemporaryDirectory(prefix="horovod-partial-") as folder:
        channel = Path(folder)
        request = {
            "script": inspect.getfile(function),
            "function": function.__name__,
            "arguments": arguments,
            "framework": framework,
            "device": device,
            "asleep": asleep,
            "process_sets": [list(members) for members in process_sets],
        }
        (channel / "request.json").write_text(json.dumps(request))
        output = channel / "output.txt"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [*(command or _horovodrun(ranks, transport)), *options, sys.executable, "-m", "harness.rank"],
                env=_environment(channel, environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                results = Results(channel)
                failure = _wait(process, channel, timeout, lambda: results.hand_to(on_result))
            finally:
                _end(process)
        if failure is None and not results.text:
            failure = "ended without a result"
        if failure is not None:
            raise LaunchError(
                f"{function.__name__} on {ranks} ranks over {transport} {failure}:\n{output.read_text(errors='replace')}"
            )
        return json.loads(results.text)


def _horovodrun(ranks: int, transport: Transport) -> list[str]:
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(ranks)]
    if transport == "gloo":
        return [*command, "--gloo"]
    # Ranks outnumber cores here; one that polls without yielding takes the core from those that have work to do.
    options = "--oversubscribe --mca mpi_yield_when_idle 1"
    if os.geteuid() == 0:
        options += " --allow-run-as-root"
    return [*command, "--mpi", f"--mpi-args={options}"]


def _environment(channel: Path, extra: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", CHANNEL: str(channel), **extra}


def _wait(process: subprocess.Popen[bytes], channel: Path, timeout: float, look: Callable[[], None]) -> str | None:
    """Wait for the job, and look at its results meanwhile and at the end; returns what went wrong."""
    deadline = time.monotonic() + timeout
    progress = ProgressBars(channel)
    with progress.bars:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return f"did not end within {timeout:.0f} s"
            progress.update()
            look()
            time.sleep(0.1)
        look()
        if process.returncode:
            return f"failed with status {process.returncode}"
        progress.finish()
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job if it still runs: politely, so that `horovodrun` ends its ranks, then by force."""
    for number, grace in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Context with so many other processes that compute all the time."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield
