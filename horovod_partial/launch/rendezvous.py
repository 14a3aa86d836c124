"""Where ranks that nobody else has introduced to each other meet: Horovod's rendezvous, at a port that all of them know."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import NoReturn

import psutil
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

PAUSE_SECONDS = 0.2
ANSWER_SECONDS = 5.0
SCOPE = "horovod-partial"  # under which a rendezvous says whose it is


def serve(ports: Sequence[int], job: str, slots: Sequence[SlotInfo]) -> int:
    """Serve the ranks of a job from a child process, until this process ends, whatever program it becomes meanwhile.

    Horovod's `RendezvousServer` takes a port of its own choice, which nobody would know, and a thread, which would not
    outlast the change to another program.

    Args:
        ports: those that may be taken.
        job: the job's name.
        slots: of its ranks.

    Returns:
        The port.

    Raises:
        OSError: none of the ports is free.
    """
    server = _bound(ports)
    server.init(slots)
    server.cache[SCOPE] = {job: b""}
    program = os.getpid()
    if os.fork() == 0:
        _serve_until_it_ends(server, program)
    server.server_close()
    return int(server.server_port)


def _bound(ports: Sequence[int]) -> RendezvousHTTPServer:
    for port in ports:
        try:
            return RendezvousHTTPServer(("", port), RendezvousHandler, 0)
        except OSError as error:
            last = error
    raise OSError(f"none of the ports {_listed(ports)} is free for the rendezvous: {last}")


def _serve_until_it_ends(server: RendezvousHTTPServer, program: int) -> NoReturn:
    """The child's life. Signals are the program's to answer, and its output is not to be held open."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        server.timeout = PAUSE_SECONDS
        while os.getppid() == program:
            server.handle_request()
    finally:
        os._exit(0)


def find(address: str, ports: Sequence[int], job: str, seconds: float) -> int:
    """Wait until the rendezvous of a job answers, and return its port. Those of other jobs are told from it.

    Raises:
        TimeoutError: it has not answered.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for port in ports:
            if _is_of(job, address, port):
                return port
        time.sleep(PAUSE_SECONDS)
    raise TimeoutError(
        f"no rendezvous of this job has answered at {address}, ports {_listed(ports)}, within {seconds:g} s: see whether "
        "a task on that node has failed. A slow start needs a larger HOROVOD_GLOO_TIMEOUT_SECONDS"
    )


def _is_of(job: str, address: str, port: int) -> bool:
    connection = http.client.HTTPConnection(address, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", f"/{SCOPE}/{job}")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def interface_to(host: str) -> str:
    """The network interface by which this machine reaches another one. Nothing is sent there.

    Raises:
        OSError: the name is unknown, or no way leads there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise OSError(f"{host} cannot be reached: {error}") from None
        own = probe.getsockname()[0]
    of_own = (name for name, addresses in psutil.net_if_addrs().items() if own in (one.address for one in addresses))
    return next(of_own)


def _listed(ports: Sequence[int]) -> str:
    return ", ".join(map(str, ports))
