"""One `horovodrun`: starts it, follows its ranks, and kills it where they hang."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed

from harness.hosts import Host, Hosts, host_of, slots
from harness.matrix import Setup

HERE = Path(__file__).resolve().parent
MPI_ARGUMENTS = "--allow-run-as-root --oversubscribe --mca mpi_yield_when_idle 1"
BINDING = "--bind-to none --map-by slot"  # Horovod's own have a single dash each, which Open MPI 6 does not know
# The same where nothing can be added to the command.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

# Progress of the pytests on the ranks, as the launcher prints it.
_DOTS = re.compile(r"\[(1,)?\d+\]<stdout>:[.sF]?(?=\[|\n|$)")

# Only hangs ever meet these. They are generous because the machine may be slow and busy.
STARTUP_SECONDS = 120.0
CASE_SECONDS = 90.0
# After the first rank has failed, the others may be waiting for it in a collective.
AFTER_FAILURE_SECONDS = 10.0
END_SECONDS = 60.0
GDB_SECONDS = 15.0  # for all ranks: pytest's own limit is near by then


@dataclass
class Outcome:
    """What became of a test on all ranks: `passed`, `skipped` or `failed`, with a text."""

    kind: str
    text: str = ""


def horovodrun(setup: Setup, command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The command line that starts `command` on the ranks of a setup, with more options of `horovodrun`."""
    if setup.transport == "none":
        return list(command)
    run = [sys.executable, str(HERE / "horovodrun.py"), "-np", str(setup.ranks)]
    run += (
        ["--mpi", f"--mpi-args={MPI_ARGUMENTS}", f"--binding-args={BINDING}"]
        if setup.transport == "mpi"
        else ["--gloo"]
    )
    if setup.hosts > 1:
        run.append("--disable-cache")  # which remembers hosts of other tests
        run += [] if "--host-discovery-script" in options else ["-H", slots(setup.hosts, setup.ranks)]
    return [*run, *options, *command]


def environment(setup: Setup, **more: str) -> dict[str, str]:
    """The environment of a launch: nothing of ours or Horovod's leaks in from the one that the tests were started in."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD", "PYTEST"))}
    clean |= {"OMP_NUM_THREADS": "1", "PY_COLORS": "0", "PYTHONUNBUFFERED": "1"}
    clean |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    # Replicas that part are a defect, which healing them would hide; tests of healing say otherwise.
    heal = {"HOROVOD_PARTIAL_HEAL": "raise"}
    return clean | heal | {"PARTIAL_TEST_PARENT": str(os.getpid())} | dict(setup.environment) | more


def build_double(name: str, folder: Path) -> Path:
    """Compile a test double into a library in `folder`."""
    library = folder / f"{name}.so"
    source = HERE.parent / "doubles" / f"{name}.c"
    subprocess.run(["mpicc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True, timeout=120)
    return library


class Processes:
    """A running `horovodrun` and its ranks, each of which writes `rank.<n>.pid` into the folder.

    The ranks find this process at the address `PARTIAL_TEST_HOST` of their environment.

    Attributes:
        hosts: that it runs on, where those are several; else empty. They live until `kill`.
    """

    def __init__(
        self, setup: Setup, command: Sequence[str], folder: Path, options: Sequence[str] = (), **variables: str
    ) -> None:
        self.setup = setup
        self.folder = folder
        self.log = folder / "log"
        variables |= {"PARTIAL_TEST_FOLDER": str(folder), "PARTIAL_TEST_HOST": "127.0.0.1"}
        run = horovodrun(setup, command, options)
        self.hosts: list[Host] = []
        with contextlib.ExitStack() as made:
            if setup.hosts > 1:
                hosts = Hosts(setup.hosts)
                made.callback(hosts.remove)
                self.hosts = hosts.all
                run = self.hosts[0].command(run)
                variables |= {"PARTIAL_TEST_HOST": hosts.own_address, "PATH": f"{hosts.path}:{os.environ['PATH']}"}
            with self.log.open("wb") as log:
                self.popen = subprocess.Popen(
                    run,
                    env=environment(setup, **variables),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._made = made.pop_all()

    def host_of(self, rank: int) -> Host:
        """The host that a rank is on."""
        return self.hosts[host_of(rank, self.setup.hosts, self.setup.ranks)]

    def rank_pids(self) -> dict[int, int]:
        """The ranks' processes that are still there."""
        pids = {}
        for file in self.folder.glob("rank.*.pid"):
            text = file.read_text()
            if text and self._is_ours(int(text)):
                pids[int(file.name.split(".")[1])] = int(text)
        return pids

    def _is_ours(self, pid: int) -> bool:
        # A process id may have been given to somebody else since.
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z" and f"PARTIAL_TEST_FOLDER={self.folder}".encode() in variables

    def left(self) -> list[int]:
        """All processes of the job that are still there, the launcher's own included."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and self._is_ours(int(entry.name))
        ]

    def dump(self) -> str:
        """The stacks of all ranks' threads, from faulthandler and, where there is one, from gdb."""
        pids = self.rank_pids()
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        text = []
        deadline = time.monotonic() + GDB_SECONDS
        for rank, pid in sorted(pids.items()):
            file = self.folder / f"rank.{rank}.dump"
            text.append(f"--- rank {rank} ---\n{file.read_text() if file.exists() else '(no dump)'}")
            if shutil.which("gdb") and (left := deadline - time.monotonic()) > 0:
                command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 12"]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
                    (self.folder / f"rank.{rank}.gdb").write_text(done.stdout)
        if shutil.which("gdb") and pids:
            text.append(f"(native stacks: {self.folder}/rank.*.gdb)")
        return "\n".join(text)

    def kill(self) -> None:
        """End `horovodrun` and every rank, and remove the hosts."""
        with self._made:
            self._end()

    def _end(self) -> None:
        if self.popen.poll() is None:
            # The whole group: over MPI horovodrun has become a shell, with mpirun below it.
            os.killpg(self.popen.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(5)
        for pid in self.rank_pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()

    def tail(self, lines: int = 40) -> str:
        """The end of what the job has printed."""
        text = _DOTS.sub("", self.log.read_text(errors="replace"))
        return "\n".join(text.splitlines()[-lines:])


class EventReader:
    """A rank's file of events, read as it grows.

    Attributes:
        newest: of each test the last event.
    """

    def __init__(self, file: Path) -> None:
        self.newest: dict[str, dict[str, Any]] = {}
        self._file = file
        self._position = 0

    def read(self) -> None:
        """Read the lines that have been written whole since the last time."""
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as file:
            file.seek(self._position)
            written = file.read()
            whole = written[: written.rfind(b"\n") + 1]
            self._position += len(whole)
            for line in whole.splitlines():
                event = json.loads(line)
                self.newest[event["test"]] = event


class Launch:
    """Runs the tests of one setup on several ranks, in order, in as few `horovodrun`s as possible.

    After a failure, a crash or a hang the job is ended, and the tests that are left run in a new one: one failure is one
    failure.
    """

    def __init__(self, setup: Setup, node_ids: Sequence[str], root: Path, arguments: Sequence[str]) -> None:
        self._setup = setup
        self._left = list(node_ids)
        self._root = root
        self._arguments = list(arguments)
        self._outcomes: dict[str, Outcome] = {}
        self._processes: Processes | None = None
        self._store: Any = None
        self._ranks: list[EventReader] = []
        self._since = 0.0
        self._first_failure = 0.0
        self._begun = False  # a test of the running job has begun
        self._failed_starts = 0
        self.starts = 0
        self.seconds = 0.0  # that tests have been waited for

    def outcome(self, node_id: str) -> Outcome:
        """Wait for a test, and return what became of it."""
        began = time.monotonic()
        try:
            return self._wait(node_id)
        finally:
            self.seconds += time.monotonic() - began

    def _wait(self, node_id: str) -> Outcome:
        while node_id not in self._outcomes:
            if self._processes is None:
                if self._failed_starts >= 2:
                    return Outcome("failed", f"{self._setup}: the job did not start, twice; see the tests before")
                self._start()
            self._look()
            time.sleep(0.02)
        return self._outcomes[node_id]

    def close(self) -> None:
        """End the job, if it runs."""
        if self._processes is not None:
            self._stop()

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"launch-{self._setup.transport}-{self._setup.ranks}-"))
        # In this process: it outlives ranks that are killed, and no port has to be guessed.
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        plan = {
            "arguments": [*self._arguments, *self._left],
            "root": str(self._root),
            "setup": asdict(self._setup),
            "store_port": self._store.port,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        command = [sys.executable, str(HERE / "rank.py"), str(folder)]
        variables = {"KERAS_BACKEND": self._setup.framework}
        if self._setup.double:
            variables["LD_PRELOAD"] = str(build_double(self._setup.double, folder))
        self._processes = Processes(self._setup, command, folder, **variables)
        self._ranks = [EventReader(folder / f"rank.{rank}.events") for rank in range(self._setup.ranks)]
        self._since = time.monotonic()
        self._first_failure = 0.0
        self._begun = False
        self.starts += 1

    def _stop(self) -> None:
        assert self._processes is not None
        self._processes.kill()
        shutil.rmtree(self._processes.folder, ignore_errors=not os.environ.get("PARTIAL_TEST_KEEP"))
        self._processes = None
        self._store = None

    def _look(self) -> None:
        processes = self._processes
        assert processes is not None
        ended = processes.popen.poll() is not None  # before the events are read, so that none is overlooked
        for reader in self._ranks:
            reader.read()
        while self._left:
            current = self._left[0]
            events = [reader.newest.get(current, {"outcome": "waiting"}) for reader in self._ranks]
            self._begun = self._begun or any(event["outcome"] != "waiting" for event in events)
            failed = any(event["outcome"] == "failed" for event in events)
            if not failed and all(event["outcome"] in ("passed", "skipped") for event in events):
                if len(self._left) == 1:
                    self._finish(events, ended)
                    return
                self._done(self._merge(events))
                self._since = time.monotonic()
                continue
            break
        else:
            return
        now = time.monotonic()
        if failed and not self._first_failure:
            self._first_failure = now
        complete = all(event["outcome"] not in ("waiting", "running") for event in events)
        if failed and (complete or ended or now - self._first_failure > AFTER_FAILURE_SECONDS):
            self._fail(events, "" if complete else "the ranks that have not finished were ended")
        elif ended:
            self._fail(events, f"the job ended with exit status {processes.popen.returncode}")
        elif now - self._since > (CASE_SECONDS if self._begun else STARTUP_SECONDS):
            text = "hang" if self._begun else "the job did not start"
            self._fail(events, f"{text}: nothing for {now - self._since:.0f} s\n{processes.dump()}")

    def _finish(self, events: Sequence[dict[str, Any]], ended: bool) -> None:
        """The last test has passed on every rank: the job must end, and end well."""
        processes = self._processes
        assert processes is not None
        if ended and processes.popen.returncode == 0:
            self._done(self._merge(events))
            self._stop()
        elif ended:
            self._fail(events, f"all tests have run, then the job ended with status {processes.popen.returncode}")
        elif time.monotonic() - self._since > CASE_SECONDS + END_SECONDS:
            self._fail(events, f"all tests have run, but the job does not end\n{processes.dump()}")

    def _done(self, outcome: Outcome) -> None:
        self._outcomes[self._left.pop(0)] = outcome
        self._failed_starts = 0

    def _merge(self, events: Sequence[dict[str, Any]]) -> Outcome:
        skipped = [event["text"] for event in events if event["outcome"] == "skipped"]
        return Outcome("skipped", skipped[0]) if skipped else Outcome("passed")

    def _fail(self, events: Sequence[dict[str, Any]], text: str) -> None:
        assert self._processes is not None
        parts = [f"{self._setup}: failed on rank(s) {[r for r, e in enumerate(events) if e['outcome'] == 'failed']}"]
        shown: dict[str, list[int]] = {}
        for rank, event in enumerate(events):
            if event["outcome"] == "failed":
                shown.setdefault(event["text"], []).append(rank)
        parts += [f"=== rank {', '.join(map(str, ranks))} ===\n{failure}" for failure, ranks in shown.items()]
        others = {rank: event["outcome"] for rank, event in enumerate(events) if event["outcome"] != "failed"}
        if others:
            parts.append("others: " + ", ".join(f"rank {rank} {outcome}" for rank, outcome in others.items()))
        if text:
            parts.append(text)
        parts.append(f"=== output of the job ===\n{self._processes.tail()}")
        failed_starts = self._failed_starts + (0 if self._begun else 1)
        self._done(Outcome("failed", "\n".join(parts)))
        self._failed_starts = failed_starts
        self._stop()
