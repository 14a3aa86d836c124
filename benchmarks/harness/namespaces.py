"""Ranks in network namespaces of their own, joined by links of limited bandwidth.

Needs root, and `ip`, `tc` and Open MPI's `mpirun`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import horovod_partial.torch as hvd

_NETWORK = "198.18.0"  # set aside for benchmarks (RFC 2544), and seen by nobody outside the namespaces
_SUBNET = f"{_NETWORK}.0/24"
_SWITCH = 254  # its address; rank r's is r + 1
_MAX_RANKS = _SWITCH - 1
_BURST = "128kb"  # that a link passes at once: two of the largest packets
_QUEUE = "100ms"  # that a link holds before it drops

# Started by mpirun instead of ssh, with an address and a command. Open MPI tells hosts apart by their names.
_AGENT = """#!/bin/sh
namespace={prefix}r$((${{1##*.}} - 1))
shift
exec ip netns exec "$namespace" unshare --uts sh -c "hostname $namespace; $*"
"""


def missing() -> str | None:
    """Why there can be no limited links here; None if there can."""
    if not hvd.mpi_built():
        return "Horovod has no MPI"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    absent = [tool for tool in ("ip", "tc", "unshare", "hostname", "mpirun") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found"
    name = f"hp{os.getpid()}"
    for command in (["netns", "add", name], ["netns", "exec", name, "true"], ["netns", "delete", name]):
        tried = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
        if tried.returncode:
            return f"ip {' '.join(command)} failed: {tried.stderr.strip()}"
    return None


@contextmanager
def limited_links(ranks: int, megabits: float, parameters: Mapping[str, str] | None = None) -> Iterator[list[str]]:
    """A switch with a link to each rank, which carries so many megabits per second in either direction.

    The switch is a bridge in a namespace of its own, where `mpirun` runs too; so nothing is changed outside.

    Args:
        ranks: how many.
        megabits: per second.
        parameters: of Open MPI, beside those that it takes to run here.

    Yields:
        The `mpirun` command that starts one rank in each namespace, to which the rank's program is to be added.
    """
    if not 1 <= ranks <= _MAX_RANKS:
        raise ValueError(f"ranks must be 1 to {_MAX_RANKS}, not {ranks}")
    prefix = f"hp{os.getpid()}"
    switch = f"{prefix}s"
    made: list[str] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces are deleted then, too
    with tempfile.TemporaryDirectory(prefix="horovod-partial-") as folder:
        try:
            for namespace in (switch, *(f"{prefix}r{rank}" for rank in range(ranks))):
                _run("ip netns add", namespace)
                made.append(namespace)
                _run("ip -netns", namespace, "link set lo up")
            _run("ip -netns", switch, "link add name switch type bridge")
            _run("ip -netns", switch, "link set switch up")
            _run("ip -netns", switch, "address add", f"{_NETWORK}.{_SWITCH}/24", "dev switch")
            for rank, namespace in enumerate(made[1:]):
                port = f"port{rank}"
                _run("ip -netns", switch, "link add", port, "type veth peer name uplink netns", namespace)
                _run("ip -netns", switch, "link set", port, "master switch up")
                _run("ip -netns", namespace, "link set uplink up")
                _run("ip -netns", namespace, "address add", f"{_NETWORK}.{rank + 1}/24", "dev uplink")
                for place, device in ((switch, port), (namespace, "uplink")):
                    shape = f"tbf rate {megabits}mbit burst {_BURST} latency {_QUEUE}"
                    _run("tc -netns", place, "qdisc add dev", device, "root", shape)
            agent = Path(folder) / "agent"
            agent.write_text(_AGENT.format(prefix=prefix))
            agent.chmod(0o700)
            yield ["ip", "netns", "exec", switch, *_mpirun(ranks, agent, parameters or {})]
        finally:
            for namespace in made:
                _delete(namespace)


def _delete(namespace: str) -> None:
    """Delete a namespace, after what may be left in it of a job that was ended by force."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for process in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    _run("ip netns delete", namespace)


def _mpirun(ranks: int, agent: Path, extra: Mapping[str, str]) -> list[str]:
    parameters = {
        "plm_rsh_agent": str(agent),
        "plm_rsh_no_tree_spawn": "1",
        "oob_tcp_if_include": _SUBNET,
        "btl": "tcp,self",
        "btl_tcp_if_include": _SUBNET,
        # Without "put", with which a message is one piece: what goes the other way waits behind it, and a pair of ranks
        # that exchange two messages uses its link in one direction at a time.
        "btl_tcp_flags": "send",
        "mpi_yield_when_idle": "1",
        **extra,
    }
    hosts = ",".join(f"{_NETWORK}.{rank + 1}:1" for rank in range(ranks))
    command = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", str(ranks), "--host", hosts]
    for name, value in parameters.items():
        command += ["--mca", name, value]
    return command


def _run(*words: str) -> None:
    subprocess.run(" ".join(words).split(), check=True)
