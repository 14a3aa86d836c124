"""Launches of whole programs, for tests about how a job begins and ends.

The programs are in `tests/parallel/programs`. A test takes the fixture `job`; nothing of it runs on the ranks.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.hosts import Host
from harness.launch import Processes, environment
from harness.matrix import Setup
from horovod_partial.launch import slurm

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
# Where programs find the harness, and the package where the tests were told to find that.
PYTHON_PATH = os.pathsep.join(filter(None, [str(PROGRAMS.parent), os.environ.get("PYTHONPATH")]))
PATIENCE_SECONDS = 90.0


class Job:
    """Starts one program on all ranks. Ranks leave notes in the job's folder: what they did, and what they saw."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        self.folder = folder
        self._processes: Processes | None = None

    def start(
        self, program: str, *arguments: str, runner: Sequence[str] = (), options: Sequence[str] = (), **variables: str
    ) -> None:
        """Start `programs/<program>.py` under `horovodrun`, with more options of that; with what runs it, if not Python."""
        command = [sys.executable, *runner, str(PROGRAMS / f"{program}.py"), *arguments]
        self._processes = Processes(self.setup, command, self.folder, options, **self._variables(variables))

    def start_elastic(
        self,
        program: str,
        *arguments: str,
        hosts: str,
        interface: str = "lo",
        runner: Sequence[str] = (),
        **variables: str,
    ) -> Path:
        """Start an elastic job of 1 to 4 ranks. Returns the file of its hosts, which may be changed."""
        file, script = self.folder / "hosts", self.folder / "discover"
        file.write_text(hosts)
        script.write_text(f"#!/bin/sh\ncat {file}\n")
        script.chmod(0o755)
        options = ["--min-np", "1", "--max-np", "4", "--host-discovery-script", str(script)]
        options += ["--network-interfaces", interface]
        self.start(program, *arguments, runner=runner, options=options, **variables)
        return file

    def run_elastic(
        self, program: str, *arguments: str, hosts: str = "localhost:2\n", then: str = "localhost:3\n", **options: Any
    ) -> dict[int, str]:
        """Run an elastic job to its good end, on other hosts from when it runs. Returns what the ranks note at the end."""
        file = self.start_elastic(program, *arguments, hosts=hosts, **options)
        self.wait_for_notes("running")
        file.write_text(then)
        assert self.wait() == 0, self.output()
        return self.notes("ended")

    @property
    def hosts(self) -> list[Host]:
        """That it runs on."""
        return self._running.hosts

    def run(self, program: str, *arguments: str, **variables: str) -> int:
        """Start a program, wait for its end, and return the exit status of `horovodrun`."""
        self.start(program, *arguments, **variables)
        return self.wait()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait until `horovodrun` and all ranks have ended; its exit status."""
        processes = self._running
        end = time.monotonic() + seconds
        while processes.popen.poll() is None or processes.rank_pids():
            if time.monotonic() > end:
                dump = processes.dump()
                raise TimeoutError(f"the job has not ended within {seconds} s\n{dump}\n{self.output()}")
            time.sleep(0.02)
        return processes.popen.returncode

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition is true; fails if the job ends before."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            ended = self._running.popen.poll() is not None
            if time.monotonic() > end or (ended and not condition()):
                raise TimeoutError(f"waited in vain until {what}\n{self.output()}")
            time.sleep(0.02)

    def wait_for_notes(self, name: str, ranks: int | None = None) -> None:
        """Wait until that many ranks, or all, have left a note of this name."""
        count = self.setup.ranks if ranks is None else ranks
        self.until(lambda: len(self.notes(name)) >= count, f"{count} ranks have left a note {name!r}")

    def notes(self, name: str) -> dict[int, str]:
        """The notes of a name, by rank."""
        files = self.folder.glob(f"note.{name}.*")
        return {int(file.name.rpartition(".")[2]): file.read_text() for file in files if not file.name.endswith(".new")}

    def say(self, name: str) -> None:
        """Let programs that wait for a word go on."""
        (self.folder / f"word.{name}").touch()

    def signal(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to a rank, or to `horovodrun` as a terminal does: to its process group."""
        if rank is None:
            os.killpg(self._running.popen.pid, number)
        else:
            os.kill(self._running.rank_pids()[rank], number)

    def output(self) -> str:
        """What the job has printed."""
        return re.sub(
            r"(?m)^.*(oneDNN|absl::|cpu_feature|rebuild TensorFlow).*\n",
            "",
            self._running.log.read_text(errors="replace"),
        )

    def close(self) -> None:
        if self._processes is not None:
            self._processes.kill()

    @property
    def _running(self) -> Processes:
        assert self._processes is not None, "start it first"
        return self._processes

    def _variables(self, variables: dict[str, str]) -> dict[str, str]:
        return {"PYTHONPATH": PYTHON_PATH} | variables


class HandStarted:
    """Ranks over Gloo without `horovodrun`, as a cluster's own scheduler would start them."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        self.setup = setup
        self.folder = folder
        self._server = RendezvousServer(verbose=0)
        self._port = self._server.start()
        self._slots = get_host_assignments(parse_hosts(f"localhost:{setup.ranks}"), setup.ranks)
        self._server.init(self._slots)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, program: str, *arguments: str) -> None:
        for slot in self._slots:
            variables = slurm.variables(slot, "127.0.0.1", self._port, "lo", {})
            variables |= {"PARTIAL_TEST_FOLDER": str(self.folder), "PYTHONPATH": PYTHON_PATH}
            log = (self.folder / f"log.{slot.rank}").open("wb")
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(PROGRAMS / f"{program}.py"), *arguments],
                    env=environment(self.setup, **variables),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def output(self) -> str:
        return "\n".join(f.read_text(errors="replace")[-3000:] for f in sorted(self.folder.glob("log.*")))

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._server.stop()
