"""Jobs that mpirun starts: what rank 0 alone has set, what ranks set against each other, and the command of docs/launchers.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import JOB, SECONDS
from digits import RANKS
from harness.hosts import Hosts, unavailable
from harness.launch import OPEN_MPI

MANIFEST = Path(__file__).resolve().parents[2] / "examples" / "kubernetes" / "mpijob.yaml"
# An unedited program of Horovod's.
UNEDITED = """
import sys
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 3)).square().mean().backward()
    optimizer.step()
from horovod_partial.settings import settings
print("policy", settings().sync, "rounds", optimizer.rounds, flush=True)
hvd.shutdown()
"""

pytestmark = [
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun needs Debian's openmpi-bin"),
]


def run(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    environment = own | OPEN_MPI | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)


def mpirun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(["mpirun", *arguments])


def test_rank_0_alone_knows_the_policy(tmp_path: Path, check: Callable[[dict[str, Any]], None]) -> None:
    path = tmp_path / "result.json"
    program = [sys.executable, str(JOB), str(path)]
    done = mpirun("-np", "1", "-x", "HOROVOD_PARTIAL_SYNC=majority", *program, ":", "-np", "3", *program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("HOROVOD_PARTIAL_SYNC=majority is set on rank 0 and not here; this rank takes it") == 3
    check(json.loads(path.read_text()))


def test_run_is_told_the_policy_on_rank_0_alone(tmp_path: Path) -> None:
    """`horovod-partial run --sync` there, and without it on the others."""
    program = tmp_path / "train.py"
    program.write_text(UNEDITED)
    started = [sys.executable, "-m", "horovod_partial", "run"]
    done = mpirun("-np", "1", *started, "--sync", "majority", str(program), ":", "-np", "3", *started, str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^policy majority rounds [1-9]\d*$", done.stdout, re.MULTILINE)) == 4, done.stdout


@pytest.mark.parametrize("by", ["variables", "run"])
def test_a_rank_that_was_told_otherwise(tmp_path: Path, by: str) -> None:
    """All ranks refuse it, by the variable and the rank, and the job ends."""
    program = tmp_path / "train.py"
    program.write_text(UNEDITED)
    started = [sys.executable, "-m", "horovod_partial", "run"]
    told = [
        ["-x", f"HOROVOD_PARTIAL_SYNC={sync}", *started, str(program)]
        if by == "variables"
        else [*started, "--sync", sync, str(program)]
        for sync in ("majority", "solo")
    ]
    done = mpirun("-np", "2", *told[0], ":", "-np", "1", *told[1], ":", "-np", "1", *started, str(program))
    assert done.returncode == 1, done.stdout + done.stderr
    message = (
        "ValueError: HOROVOD_PARTIAL_SYNC is solo on rank 2, but majority on rank 0: set it alike on every rank, or on"
    )
    assert message in done.stderr
    assert done.stdout == ""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """A host for the launcher, and one for each worker of the MPIJob."""
    if reason := unavailable():
        pytest.skip(reason)
    made = Hosts(1 + RANKS)
    yield made
    made.remove()


def test_the_command_of_the_mpijob(hosts: Hosts, tmp_path: Path, check: Callable[[dict[str, Any]], None]) -> None:
    """As in its pods: the launcher is no rank, hosts stand in a file, and SSH leads to them. The program alone is another."""
    path, hostfile = tmp_path / "result.json", tmp_path / "hostfile"
    replicas = yaml.safe_load(MANIFEST.read_text())["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    assert launcher["command"] == ["mpirun"]
    assert launcher["args"][-2:] == ["python", "/train/train.py"]
    hostfile.write_text("".join(f"{host.name} slots=1\n" for host in hosts.all[1:]))
    variables = {variable["name"]: variable["value"] for variable in launcher["env"]} | {"OMP_NUM_THREADS": "1"}
    variables |= {
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "PATH": f"{hosts.path}{os.pathsep}{os.environ['PATH']}",
    }
    start = hosts.all[0].command(["mpirun", *launcher["args"][:-2], sys.executable])
    done = run(
        [*start, "-c", "import os, socket; print(socket.gethostname(), os.environ.get('TERM'))"],
        TERM="here",
        **variables,
    )
    assert sorted(done.stdout.splitlines()) == [f"host{number} None" for number in range(2, 6)], done.stderr
    done = run([*start, str(JOB), str(path)], **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this rank takes it" not in done.stderr
    check(json.loads(path.read_text()))
