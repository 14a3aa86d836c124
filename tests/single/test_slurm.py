"""`horovod-partial srun`: what it makes of Slurm's variables, and how ranks find each other, on one machine."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NoReturn

import pytest
from interpreter import run_command

from horovod_partial import _build_info
from horovod_partial.launch import rendezvous, slurm

# What srun sets for the third of four tasks, of which the first node has three.
STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_JOB_NODELIST": "node[1-9]",
    "SLURM_TASKS_PER_NODE": "4(x9)",
}
HOSTS = ["node1", "node2"]


def task(**variables: str) -> slurm.Task:
    return slurm.task_of(STEP | variables)


def test_a_task_is_told_its_place_in_the_step() -> None:
    assert task() == slurm.Task("17.2", rank=2, node=0, local_rank=2, tasks=(3, 1), nodes="node[1-2]")


TASKS = [("4", (4,)), ("2(x3)", (2, 2, 2)), ("2(x3),1", (2, 2, 2, 1)), ("1,12(x2),1", (1, 12, 12, 1))]


@pytest.mark.parametrize(("text", "tasks"), TASKS)
def test_tasks_of_nodes(text: str, tasks: tuple[int, ...]) -> None:
    assert task(SLURM_STEP_TASKS_PER_NODE=text).tasks == tasks


@pytest.mark.parametrize("name", [name for name in STEP if name not in ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")])
def test_outside_of_a_step(name: str) -> None:
    """A batch script without srun has some of the variables."""
    environ = {key: value for key, value in STEP.items() if key != name}
    with pytest.raises(ValueError, match=f"^{name} is not set, so srun has not started this; run `srun -n 4 horovod-"):
        slurm.task_of(environ)


# Of each task: node, local rank and rank; then what Horovod is told of it.
BLOCK = {(0, 0, 0): (0, 0, 3, 0, 2), (0, 1, 1): (1, 1, 3, 0, 1), (0, 2, 2): (2, 2, 3, 0, 1), (1, 0, 3): (3, 0, 1, 1, 2)}
CYCLIC = {
    (0, 0, 0): (0, 0, 3, 0, 2),
    (1, 0, 1): (1, 0, 1, 1, 2),
    (0, 1, 2): (2, 1, 3, 0, 1),
    (0, 2, 3): (3, 2, 3, 0, 1),
}


@pytest.mark.parametrize("places", [BLOCK, CYCLIC])
def test_slots(places: dict[tuple[int, int, int], tuple[int, ...]]) -> None:
    """Three tasks on one node and one on the other, dealt out in either way."""
    for (node, local_rank, rank), expected in places.items():
        one = task(SLURM_NODEID=str(node), SLURM_LOCALID=str(local_rank), SLURM_PROCID=str(rank))
        slot = slurm.slot_of(one, slurm.slots_of(one, HOSTS))
        assert (slot.hostname, slot.size) == (HOSTS[node], 4)
        assert (slot.rank, slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size) == expected


def test_the_rendezvous_is_on_the_first_node_whichever_rank_is_there() -> None:
    first = task(SLURM_PROCID="1", SLURM_LOCALID="0")
    others = [task(), task(SLURM_PROCID="0", SLURM_NODEID="1", SLURM_LOCALID="0")]
    assert first.has_rendezvous
    assert not any(one.has_rendezvous for one in others)


def test_ports_are_those_of_the_step() -> None:
    ports = slurm.ports_of(task())
    assert ports == slurm.ports_of(task(SLURM_PROCID="3", SLURM_NODEID="1"))
    assert len(set(ports)) == slurm.CANDIDATES
    assert set(ports) <= set(slurm.PORTS)
    assert ports != slurm.ports_of(task(SLURM_STEP_ID="3"))
    assert ports != slurm.ports_of(task(SLURM_JOB_ID="18"))


def test_an_interface_is_sought_towards_another_node() -> None:
    """The first node's name may be that of its loopback device, on the first node."""
    assert slurm.neighbour_of(task(), HOSTS) == "node2"
    assert slurm.neighbour_of(task(SLURM_NODEID="1"), HOSTS) == "node1"
    assert slurm.neighbour_of(task(), HOSTS[:1]) == "127.0.0.1"


def test_variables() -> None:
    slot = slurm.slot_of(task(), slurm.slots_of(task(), HOSTS))
    numbers = {"RANK": 2, "SIZE": 4, "LOCAL_RANK": 2, "LOCAL_SIZE": 3, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    expected = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()} | {
        "HOROVOD_HOSTNAME": "node1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "20123",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    assert slurm.variables(slot, "10.0.0.1", 20123, "eth0", {}) == expected
    chosen = {"HOROVOD_GLOO_IFACE": "ib0"}
    assert slurm.variables(slot, "10.0.0.1", 20123, "eth0", STEP | chosen) == expected | chosen


def test_seconds_are_those_of_gloo() -> None:
    assert slurm.seconds_of({}) == 30
    assert slurm.seconds_of({"HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}) == 120
    with pytest.raises(ValueError, match=r"^HOROVOD_GLOO_TIMEOUT_SECONDS must be a number of seconds, but is 'long'$"):
        slurm.seconds_of({"HOROVOD_GLOO_TIMEOUT_SECONDS": "long"})


def test_the_command_outside_of_a_step() -> None:
    command = [sys.executable, "-m", "horovod_partial", "srun", "python", "train.py", "--lr", "0.1"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = run_command(*command, env=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "horovod-partial srun: SLURM_JOB_ID is not set, so srun has not started this; "
        "run `srun -n 4 horovod-partial srun python train.py`\n"
    )


def test_a_horovod_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build_info, "FEATURES", ("mpi",))
    told = "^Horovod was built without Gloo; use MPI: `srun --mpi=pmix -n 4 python train"
    with pytest.raises(ValueError, match=told):
        slurm.run(["true"])


def test_the_loopback_device_leads_to_this_machine() -> None:
    assert rendezvous.interface_to("127.0.0.1") == "lo"
    with pytest.raises(OSError, match=r"^no-such-node\.invalid cannot be reached: "):
        rendezvous.interface_to("no-such-node.invalid")


@contextlib.contextmanager
def somebody(port: int) -> Iterator[None]:
    """A server of somebody else's, who knows of no job."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def knock(port: int) -> NoReturn:
    """As long as somebody opens. The test's timeout ends this where somebody does so for ever."""
    while True:
        socket.create_connection(("127.0.0.1", port)).close()


# Serves, says at which port, and becomes another program, which lives until its input ends.
SERVING = """
import os, sys
from horovod_partial.launch import rendezvous, slurm
task = slurm.Task("17.2", 0, 0, 0, (1,), "node1")
port = rendezvous.serve([int(port) for port in sys.argv[1:]], task.step, slurm.slots_of(task, ["node1"]))
print(port, flush=True)
os.execvp("cat", ["cat"])
"""


def test_a_port_that_is_taken_is_passed_over_and_the_rendezvous_lives_as_long_as_the_program() -> None:
    ports = free_ports(2)
    command = [sys.executable, "-c", SERVING, *map(str, ports)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with somebody(ports[0]), subprocess.Popen(command, text=True, **pipes) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert int(program.stdout.readline()) == ports[1]
        assert rendezvous.find("127.0.0.1", ports, "17.2", 30) == ports[1]
        told = rf"at 127\.0\.0\.1, ports {ports[0]}, {ports[1]}, within 1 s: see whether"
        with pytest.raises(TimeoutError, match=told):
            rendezvous.find("127.0.0.1", ports, "17.3", 1)  # of another step
        program.stdin.close()
        assert program.stdout.read() == ""  # nobody holds the program's output open
        assert program.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            knock(ports[1])


def test_no_port_is_free() -> None:
    ports = free_ports(2)
    told = rf"^none of the ports {ports[0]}, {ports[1]} is"
    with somebody(ports[0]), somebody(ports[1]), pytest.raises(OSError, match=told):
        rendezvous.serve(ports, "17.2", [])
