"""Turns the tasks of a Slurm step into ranks of Horovod over Gloo: the command `horovod-partial srun`."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

from horovod_partial.launch import rendezvous

LOOPBACK = "127.0.0.1"
# A rendezvous server listens on one of these ports. Few are in use: Linux's outgoing connections have higher ports.
PORTS = range(20000, 30000)
CANDIDATES = 8  # how many ports a rendezvous server tries until one is free
# Each of these variables chooses a network interface. A value that the user has set is kept.
INTERFACE_VARIABLES = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Task:
    """What Slurm tells a task about itself and its step.

    `step` names the step, and is unique in the cluster. `rank` and `node` number the task and its node in the step, and
    `local_rank` the task on its node. `tasks` has the number of tasks on each node. `nodes` are those of the step, in
    Slurm's short form.
    """

    step: str
    rank: int
    node: int
    local_rank: int
    tasks: tuple[int, ...]
    nodes: str

    @property
    def has_rendezvous(self) -> bool:
        """Whether this task serves the rendezvous. It need not be rank 0: `--distribution` may put rank 0 elsewhere."""
        return self.node == self.local_rank == 0


def task_of(environ: Mapping[str, str]) -> Task:
    """Read Slurm's variables of a step. (The job's variables do not fit: a step may use only some of the job's nodes.)

    Raises ValueError if this process is not a task of a step.
    """
    try:
        return Task(
            step=f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}",
            rank=int(environ["SLURM_PROCID"]),
            node=int(environ["SLURM_NODEID"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            tasks=_counts(environ["SLURM_STEP_TASKS_PER_NODE"]),
            nodes=environ["SLURM_STEP_NODELIST"],
        )
    except KeyError as error:
        raise ValueError(
            f"{error.args[0]} is not set, so srun has not started this; run `srun -n 4 horovod-partial srun python train.py`"
        ) from None


def _counts(text: str) -> tuple[int, ...]:
    """Read numbers of tasks in Slurm's short form: `2(x3),1` means 2, 2, 2, 1."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(count) for count, times in runs for _ in range(int(times or 1)))


def slots_of(task: Task, hosts: Sequence[str]) -> list[SlotInfo]:
    """Return the slots that Horovod's own launcher would start on a step's hosts. `hosts` are in the step's order."""
    shares = [HostInfo(host, count) for host, count in zip(hosts, task.tasks, strict=True)]
    return get_host_assignments(shares, sum(task.tasks))


def slot_of(task: Task, slots: Sequence[SlotInfo]) -> SlotInfo:
    """Return the slot of a task. The slot's rank is Slurm's number, by which srun labels output and reports failures.

    Horovod itself numbers ranks host by host. Its operations over Gloo do not need this order, so any distribution of
    tasks works.
    """
    before = sum(task.tasks[: task.node])
    return replace(slots[before + task.local_rank], rank=task.rank)


def ports_of(task: Task) -> list[int]:
    """Return ports for the rendezvous to try, the same on every task of a Slurm step. Some may be in use."""
    return random.Random(task.step).sample(PORTS, CANDIDATES)


def neighbour_of(task: Task, hosts: Sequence[str]) -> str:
    """Return a host of the step. The network interface that leads to this host also leads to all other hosts."""
    if len(hosts) == 1:
        return LOOPBACK
    return hosts[1 if task.node == 0 else 0]


def variables(slot: SlotInfo, address: str, port: int, interface: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that Horovod's own launcher would set for a rank."""
    chosen = {name: environ[name] for name in INTERFACE_VARIABLES if name in environ}
    of_run = create_run_env_vars(address, [interface], port)
    return create_slot_env_vars(slot) | {name: str(value) for name, value in of_run.items()} | chosen


def seconds_of(environ: Mapping[str, str]) -> int:
    """Return HOROVOD_GLOO_TIMEOUT_SECONDS (30 if not set): how many seconds tasks wait for the rendezvous.

    Raises ValueError if the variable is not a number.
    """
    text = environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30")
    if not text.isdecimal():
        raise ValueError(f"HOROVOD_GLOO_TIMEOUT_SECONDS must be a number of seconds, but is {text!r}")
    return int(text)


def run(command: list[str]) -> NoReturn:
    """Replace this process by `command`, as a rank of the Slurm step.

    Raises OSError if there is no such program, or the ranks cannot find each other, and ValueError if this process is
    not a task of a step, or Horovod was built without Gloo.
    """
    from horovod_partial import _build_info as built  # the build of this package generates `_build_info`

    if "gloo" not in built.FEATURES:
        raise ValueError("Horovod was built without Gloo; use MPI: `srun --mpi=pmix -n 4 python train.py`")
    task, seconds = task_of(os.environ), seconds_of(os.environ)
    try:
        hosts = _host_names(task.nodes)
        slots, ports = slots_of(task, hosts), ports_of(task)
        interface = rendezvous.interface_to(neighbour_of(task, hosts))
        address = LOOPBACK if task.node == 0 else socket.gethostbyname(hosts[0])
        if task.has_rendezvous:
            port = rendezvous.serve(ports, task.step, slots)
        else:
            port = rendezvous.find(address, ports, task.step, seconds)
        os.environ.update(variables(slot_of(task, slots), address, port, interface, os.environ))
        try:
            os.execvp(command[0], command)
        except OSError as error:
            raise OSError(f"{command[0]} cannot be run: {error.strerror}") from None
    except OSError as error:
        raise OSError(f"task {task.rank} of step {task.step}: {error}") from None


def _host_names(nodes: str) -> list[str]:
    """Return the names of nodes that are given in Slurm's short form."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], check=True, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise OSError(f"Slurm's scontrol is needed on each node, to tell the nodes' names: {error}") from None
    return done.stdout.split()
