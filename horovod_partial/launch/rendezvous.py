"""Serves Horovod's rendezvous on a port that all ranks can find, for launchers that do not start a rendezvous."""

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
SCOPE = "horovod-partial"  # clients ask a rendezvous server for this scope, to learn whether it serves their job


def serve(ports: Sequence[int], job: str, slots: Sequence[SlotInfo]) -> int:
    """Serve the ranks of a job from a child process until this process ends, even if it executes another program.

    Horovod's `RendezvousServer` does not fit: other ranks would not know the port that it chooses, and its thread would
    end when this process executes another program. `slots` has Horovod's description of each rank. Returns the chosen
    port, one of `ports`. Raises OSError if none of these ports is free.
    """
    for port in ports:
        try:
            server = RendezvousHTTPServer(("", port), RendezvousHandler, 0)
            break
        except OSError as error:
            last = error
    else:
        raise OSError(f"none of the ports {', '.join(map(str, ports))} is free for the rendezvous: {last}")
    server.init(slots)
    server.cache[SCOPE] = {job: b""}
    program = os.getpid()
    if os.fork() == 0:
        _serve_until_it_ends(server, program)
    server.server_close()
    return int(server.server_port)


def _serve_until_it_ends(server: RendezvousHTTPServer, program: int) -> NoReturn:
    """Serve until the process `program` ends. Block signals and close output, because both belong to the program."""
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
    """Wait until the rendezvous of a job answers, and return its port. Servers of other jobs are skipped.

    Raises TimeoutError if the rendezvous has not answered within `seconds`.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for port in ports:
            if _is_of(job, address, port):
                return port
        time.sleep(PAUSE_SECONDS)
    raise TimeoutError(
        f"no rendezvous of this job has answered at {address}, ports {', '.join(map(str, ports))}, within {seconds:g} s: see whether "
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
    """Return the name of the network interface through which this machine reaches a host. Nothing is sent.

    Raises OSError if the host's name is unknown, or there is no route to the host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise OSError(f"{host} cannot be reached: {error}") from None
        own = probe.getsockname()[0]
    addresses = psutil.net_if_addrs().items()
    return next(name for name, of_name in addresses if own in (address.address for address in of_name))
