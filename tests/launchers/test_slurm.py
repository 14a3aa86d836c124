"""Jobs of Slurm: `horovod-partial srun` over Gloo, and srun over MPI, on the nodes of a cluster of its own."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
from conftest import JOB, SECONDS, VARIABLES
from harness.launch import OPEN_MPI

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs" / "launchers.md"
GLOO = ["horovod-partial", "srun", sys.executable]
# Jobs of root may take longer than Gloo's usual 30 s to start where ranks outnumber cores.
GLOO_VARIABLES = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}

pytestmark = pytest.mark.timeout(2 * SECONDS)

Check = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm_cluster.Cluster]:
    if reason := slurm_cluster.unavailable():
        pytest.skip(reason)
    made = slurm_cluster.Cluster()
    yield made
    made.remove()


def succeeds(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submitted(cluster: slurm_cluster.Cluster, folder: Path, *options: str, **variables: str) -> str:
    """Run `job.sh` of a folder by sbatch, and return its output."""
    command = ["sbatch", "--wait", "--output=job.log", *options, "job.sh"]
    done = cluster.run(command, SECONDS, variables, folder)
    out = (folder / "job.log").read_text()
    assert done.returncode == 0, out + done.stderr
    return out


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_the_scripts_of_the_docs(cluster: slurm_cluster.Cluster, tmp_path: Path, check: Check, transport: str) -> None:
    """Two tasks on each of two nodes, the policy from the environment. Over MPI Debian's Slurm and Open MPI meet by PMIx."""
    script, last_line = re.findall(r"```bash\n((?:#!/bin/bash|srun --mpi).*?)```", DOCS.read_text(), re.DOTALL)
    if transport == "mpi":
        script = re.sub(r"^srun .*\n", last_line, script, flags=re.MULTILINE)
    (tmp_path / "job.sh").write_text(script)
    program = f"import runpy, sys\nsys.argv[1:] = ['result.json']\nrunpy.run_path({str(JOB)!r}, run_name='__main__')\n"
    (tmp_path / "train.py").write_text(program)
    # The scripts give two threads to each rank, which here would spin on cores that others need.
    variables = (GLOO_VARIABLES if transport == "gloo" else OPEN_MPI) | {"OMP_WAIT_POLICY": "PASSIVE"}
    submitted(cluster, tmp_path, **variables)
    check(json.loads((tmp_path / "result.json").read_text()))


def test_tasks_dealt_out_in_turn(cluster: slurm_cluster.Cluster, tmp_path: Path, check: Check) -> None:
    """Three on one node and one on the other, which is rank 1."""
    path = tmp_path / "result.json"
    command = ["srun", "-K", "-N2", "-n4", "--distribution=cyclic", *GLOO, str(JOB), str(path)]
    succeeds(cluster.run(command, SECONDS, VARIABLES | GLOO_VARIABLES))
    check(json.loads(path.read_text()))


def test_rank_0_alone_knows_the_policy(cluster: slurm_cluster.Cluster, tmp_path: Path, check: Check) -> None:
    path = tmp_path / "result.json"
    script = f"""
    if [ "$SLURM_PROCID" = 0 ]; then export HOROVOD_PARTIAL_SYNC=majority; fi
    exec {" ".join(GLOO)} {JOB} {path}
    """
    variables = GLOO_VARIABLES | {"OMP_NUM_THREADS": "1"}
    done = cluster.run(["srun", "-K", "-N2", "-n4", "sh", "-c", script], SECONDS, variables)
    succeeds(done)
    assert "HOROVOD_PARTIAL_SYNC=majority is set on rank 0 and not here; this rank takes it" in done.stderr
    check(json.loads(path.read_text()))


# Of each rank: node, rank, local rank and size, cross rank and size. Over any transport Horovod orders the ranks that have one
# local rank by their ranks.
PLACES = {
    "block": ("srun -w host[1-2] -n4 PROGRAM", "1 0 0 3 0 2, 1 1 1 3 0 1, 1 2 2 3 0 1, 2 3 0 1 1 2"),
    "cyclic": ("srun -w host[1-2] -n4 -m cyclic PROGRAM", "1 0 0 3 0 2, 2 1 0 1 1 2, 1 2 1 3 0 1, 1 3 2 3 0 1"),
    "rank 0 on the second node": (
        "env SLURM_HOSTFILE=nodes srun -n4 -m arbitrary PROGRAM",
        "2 0 0 2 0 2, 1 1 0 2 1 2, 1 2 1 2 0 2, 2 3 1 2 1 2",
    ),
    "three nodes": ("srun -N3 -n3 PROGRAM", "1 0 0 1 0 3, 2 1 0 1 1 3, 3 2 0 1 2 3"),
    "one of the job's nodes": ("salloc -N3 -n9 srun -N1 -w host2 -n3 PROGRAM", "2 0 0 3 0 1, 2 1 1 3 0 1, 2 2 2 3 0 1"),
    "two components": ("srun -w host1 -n2 PROGRAM : -w host2 -n1 PROGRAM", "1 0 0 2 0 2, 1 1 1 2 0 1, 2 2 0 1 1 2"),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_of_ranks(cluster: slurm_cluster.Cluster, tmp_path: Path, name: str) -> None:
    command, expected = PLACES[name]
    (tmp_path / "nodes").write_text("host2\nhost1\nhost1\nhost2\n")
    command = command.replace("PROGRAM", " ".join([*GLOO, str(HERE / "placement.py")]))
    variables = GLOO_VARIABLES | {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "OMP_NUM_THREADS": "1"}
    out = succeeds(cluster.run(command.split(), SECONDS, variables, tmp_path))
    places = dict(re.findall(r"place host(\d (\d) \d \d \d \d) \2$", out, re.MULTILINE))
    assert sorted(places) == sorted(expected.split(", ")), out


# How a rank fails, and what says so.
FAILURES = {
    "raise": "rank {rank} has failed: ValueError: this is what has failed",
    "exit": "rank {rank} has failed: it exits with status 3",
    "kill": "task {rank}: Killed",
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_fails(cluster: slurm_cluster.Cluster, rank: int, how: str) -> None:
    """The step ends. Its status is the largest of its tasks', some of which Slurm may have ended; rank 0 has the rendezvous."""
    program = [str(HERE / "failing.py"), how, str(rank)]
    done = cluster.run(["srun", "-K", "-l", "-N2", "-n4", *GLOO, *program], SECONDS, GLOO_VARIABLES)
    assert done.returncode != 0, done.stdout + done.stderr
    assert FAILURES[how].format(rank=rank) in done.stderr, done.stderr
    assert "trained to the end" not in done.stdout


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_end_without_slurms_help(cluster: slurm_cluster.Cluster, rank: int) -> None:
    """Without `-K` Slurm leaves the other tasks alone; Horovod ends them."""
    program = [str(HERE / "failing.py"), "raise", str(rank)]
    done = cluster.run(["srun", "-l", "-N2", "-n4", *GLOO, *program], SECONDS, GLOO_VARIABLES)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"rank {rank} has failed: ValueError: this is what has failed" in done.stderr
    assert "trained to the end" not in done.stdout


def test_nobody_waits_for_ever_for_a_rendezvous(cluster: slurm_cluster.Cluster) -> None:
    script = f"if [ $SLURM_PROCID = 0 ]; then exit 5; fi; exec {' '.join(GLOO)} -c pass"
    done = cluster.run(["srun", "-N2", "-n2", "sh", "-c", script], SECONDS, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3"})
    assert done.returncode == 5
    assert re.search(
        r"horovod-partial srun: task 1 of step \d+\.0: no rendezvous of this job has answered at 198\.18\.\d+\.\d, ports "
        r"[\d, ]+, within 3 s: see whether a task on that node has failed\.",
        done.stderr,
    ), done.stderr


def test_a_program_that_is_not_there(cluster: slurm_cluster.Cluster) -> None:
    done = cluster.run(["srun", "-n1", "horovod-partial", "srun", "absent.py"], SECONDS)
    assert done.returncode == 2
    assert re.search(
        r"^horovod-partial srun: task 0 of step \d+\.0: absent\.py cannot be run: No such file", done.stderr
    )


def test_a_batch_script_without_srun(cluster: slurm_cluster.Cluster, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\nhorovod-partial srun python train.py; test $? = 2\n")
    out = submitted(cluster, tmp_path, "-n2")
    assert out.startswith("horovod-partial srun: SLURM_STEP_ID is not set, so srun has not started this; run `srun ")


def test_a_signal_is_the_programs(cluster: slurm_cluster.Cluster, tmp_path: Path) -> None:
    """A step that is told of its end saves. No launcher stands between Slurm and the program."""
    step = f"srun -n2 {' '.join(GLOO)} {HERE / 'signalled.py'}"
    (tmp_path / "job.sh").write_text(
        f"#!/bin/sh\n{step} &\nwhile ! grep -q running job.log; do sleep 0.1; done\n"
        "scancel --signal=USR1 $SLURM_JOB_ID.0\nwait $!\n"
    )
    assert "saved by 2 ranks" in submitted(cluster, tmp_path, "-n2", **GLOO_VARIABLES)


def test_a_job_that_is_requeued_goes_on(cluster: slurm_cluster.Cluster, tmp_path: Path) -> None:
    """From its checkpoint, on the same ports."""
    step = f"srun -n2 {' '.join(GLOO)} {HERE / 'resuming.py'}"
    (tmp_path / "job.sh").write_text(
        f"#!/bin/sh\n{step} &\n"
        "if [ -z $SLURM_RESTART_COUNT ]; then\n"
        "    while ! grep -q 'epoch 1 of 4' job.log; do sleep 0.1; done\n"
        "    scontrol requeue $SLURM_JOB_ID\n"
        "fi\nwait $!\n"
    )
    out = submitted(cluster, tmp_path, "-n2", "--requeue", "--open-mode=append", **GLOO_VARIABLES)
    first, second = out.split("begins at epoch 0")[1].split("begins at epoch ")
    assert second[0] != "0"
    assert "epoch 4 of 4, rate 0.00625" in second
    assert "epoch 4 of 4" not in first
