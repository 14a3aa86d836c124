"""Programs of others, unedited, with Horovod alone and with ours in its place: `make test-clients`.

With Full and with a recording, each rank ends with the model that it has with Horovod alone, bit for bit. Under Majority, where
rank 1 is slow, all ranks end with one model, or a warning says that they may not; or the program is refused at its start.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from clients import CLIENTS, ONE_MODEL, TOLD, Client
from data import make

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "parallel"))
from harness.launch import environment, horovodrun
from harness.matrix import Setup

from horovod_partial.insight import recording

pytest.importorskip("pyro", reason="needs the packages that `make test-clients` installs")
RANKS = 2
SECONDS = 300  # a launch takes some twenty; other work may share the cores
# What says that ranks may end with different models.
WARNINGS = (
    "So its model may differ from those of other ranks",
    "So replicas part with any optimizer but plain SGD",  # of a tape, when it is made
)
RUN = ("-m", "horovod_partial", "run")
pytestmark = pytest.mark.timeout(SECONDS + 100)


class Run(NamedTuple):
    """What became of a launch: its exit status, its output, and what each rank has trained."""

    status: int
    output: str
    ranks: dict[int, dict[str, Any]]

    @property
    def models(self) -> set[str]:
        return {rank["model"] for rank in self.ranks.values() if rank["tensors"]}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make(folder)
    return folder


@pytest.fixture(scope="module", params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest) -> Client:
    return request.param


def launch(client: Client, data: Path, folder: Path, *runner: str, **variables: str) -> Run:
    """Run a program on all ranks, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    program = client.command()
    arguments = shlex.split(client.arguments.format(data=data, own=folder))
    options = []
    if client.elastic:
        script = folder / "discover"
        script.write_text(f"#!/bin/sh\necho localhost:{RANKS}\n")
        script.chmod(0o755)
        options = ["--min-np", str(RANKS), "--max-np", str(RANKS), "--host-discovery-script", str(script)]
        options += ["--network-interfaces", "lo"]
    setup = Setup(client.transport, RANKS)
    command = [sys.executable, *runner, str(HERE / "observe.py"), *program, *arguments]
    notes = {"CLIENT_NOTES": str(folder), "CLIENT_FRAMEWORK": client.framework, "CLIENT_MNIST": str(data / "mnist.npz")}
    path = os.pathsep.join(filter(None, [*client.paths(), str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    # Users have replicas that part healed, and the harness of the other tests has not.
    own = {"HOROVOD_PARTIAL_HEAL": "1", "PYTHONPATH": path}
    done = subprocess.run(
        ["timeout", "--kill-after=10", str(SECONDS), *horovodrun(setup, command, options)],
        env=environment(setup, **own, **notes, **client.variables, **variables),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    files = {rank: folder / f"rank.{rank}.json" for rank in range(RANKS)}
    return Run(
        done.returncode, done.stdout, {rank: json.loads(f.read_text()) for rank, f in files.items() if f.exists()}
    )


@pytest.fixture(scope="module")
def stock(client: Client, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The program with Horovod alone."""
    run = launch(client, data, tmp_path_factory.mktemp("stock"))
    if client.fails:
        assert run.status != 0
        assert client.fails in run.output, run.output
    else:
        assert run.status == 0, run.output
        if "CLIENT_OUTCOME" not in client.variables:
            assert all(rank["steps"] > 0 for rank in run.ranks.values())
            assert len(run.models) == 1, "Horovod alone makes one model"
    return run


def check_equal(client: Client, stock: Run, run: Run) -> None:
    """A program does what it does with Horovod alone, or is refused."""
    if client.refusal:
        assert run.status != 0
        assert client.refusal in run.output, run.output
    elif client.only_ours:
        assert run.status == 0, run.output
        assert len(run.models) == 1
    elif not client.repeats:
        assert run.status == 0, run.output
        assert len(run.models) == 1
        assert [rank["steps"] for rank in run.ranks.values()] == [rank["steps"] for rank in stock.ranks.values()]
    else:
        assert run.status == 0, run.output
        assert run.ranks == stock.ranks, run.output


def test_full(client: Client, data: Path, stock: Run, tmp_path: Path) -> None:
    check_equal(client, stock, launch(client, data, tmp_path, *RUN, "--sync", "full"))


def test_recorded(client: Client, data: Path, stock: Run, tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    run = launch(client, data, tmp_path, *RUN, "--record", str(folder))
    check_equal(client, stock, run)
    if run.status == 0:
        assert set(recording.load(folder).ranks) == set(range(RANKS))


def test_majority(client: Client, data: Path, tmp_path: Path) -> None:
    run = launch(client, data, tmp_path, *RUN, "--sync", "majority", CLIENT_SLOW="1")
    if client.majority not in (ONE_MODEL, TOLD):
        assert run.status != 0
        assert client.majority in run.output, run.output
        return
    assert run.status == 0, run.output
    assert set(run.ranks) == set(range(RANKS))
    if client.majority == ONE_MODEL:
        assert len(run.models) == 1, run.output
    else:
        assert len(run.models) == 1 or any(text in run.output for text in WARNINGS), run.output
