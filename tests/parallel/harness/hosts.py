"""Several hosts on one machine: namespaces with a network and a host name of their own, an SSH server in each.

They share files and processes. Making them needs root, Linux, iproute2, nftables and OpenSSH's server.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

SSHD = "/usr/sbin/sshd"  # which wants to be called by its whole path
START_SECONDS = 20.0
KILL_SECONDS = 20.0
# Addresses for tests of networks (RFC 2544), of which each `Hosts` takes the next number.
_NETWORK, _NETWORKS = "198.18", 100


def unavailable() -> str | None:
    """Why there can be no hosts here, or None."""
    missing = [tool for tool in ("ip", "tc", "nft", "nsenter", "ssh", "ssh-keygen", SSHD) if shutil.which(tool) is None]
    if missing:
        return f"several hosts need {', '.join(missing)}"
    if os.geteuid() != 0:
        return "several hosts need root"
    return None


def host_of(rank: int, hosts: int, ranks: int) -> int:
    """The number of the host that a rank is on, where `ranks` are on so many hosts."""
    return rank * hosts // ranks


def slots(hosts: int, ranks: int) -> str:
    """`ranks` on so many hosts, as `horovodrun -H` takes them."""
    shares = Counter(host_of(rank, hosts, ranks) for rank in range(ranks))
    return ",".join(f"host{number + 1}:{share}" for number, share in shares.items())


class Host:
    """A host.

    Attributes:
        name: what `hostname` says there, and other hosts call it.
        address: its IPv4 address.
    """

    def __init__(self, name: str, namespace: str, address: str) -> None:
        self.name = name
        self.address = address
        self._namespace = namespace
        self._port = f"{namespace}p"  # the end of its cable that is in the switch
        self._server: subprocess.Popen[bytes] | None = None

    def connect(self, bridge: str) -> None:
        """Make it, with a cable to the switch."""
        _run("ip", "netns", "add", self._namespace)
        _run("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        _run("ip", "link", "set", self._port, "master", bridge, "up")
        _run("ip", "-n", self._namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", self._namespace, "link", "set", device, "up")

    def serve(self, folder: Path) -> None:
        """Start its SSH server, with what is in this folder. The server's process keeps the namespaces of this host."""
        # Gloo asks for the address of the host's name, and crashes where there is none.
        script = f"mount --bind {folder}/hosts /etc/hosts && hostname {self.name} && exec {SSHD} -D -e -f {folder}/sshd_config"
        with (folder / f"{self.name}.log").open("wb") as log:
            self._server = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, "unshare", "--uts", "--mount", "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` there."""
        assert self._server is not None, "serve first"
        return ["nsenter", f"--target={self._server.pid}", "--net", "--uts", "--mount", f"--wd={os.getcwd()}", *command]

    def _pids(self) -> list[int]:
        return [int(pid) for pid in _run("ip", "netns", "pids", self._namespace).split()]

    def is_serving(self) -> bool:
        try:
            socket.create_connection((self.address, 22), 0.5).close()
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Without its cable."""
        _run("ip", "link", "set", self._port, "down")
        try:
            yield
        finally:
            _run("ip", "link", "set", self._port, "up")

    @contextlib.contextmanager
    def slow(self, rate: str = "1mbit") -> Iterator[None]:
        """With a cable of this rate, in each direction."""
        here, there = ("tc", "qdisc"), ("tc", "-n", self._namespace, "qdisc")
        for tc, device in ((here, self._port), (there, "eth0")):
            _run(*tc, "add", "dev", device, "root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
        try:
            yield
        finally:
            for tc, device in ((here, self._port), (there, "eth0")):
                _run(*tc, "del", "dev", device, "root")

    @contextlib.contextmanager
    def lossy(self) -> Iterator[None]:
        """With a cable that loses 5 % of all packets, in each direction."""
        nft = ("ip", "netns", "exec", self._namespace, "nft")
        drop = "numgen random mod 100 < 5 drop;"
        chains = [f"chain {hook} {{ type filter hook {hook} priority 0; {drop} }};" for hook in ("input", "output")]
        _run(*nft, f"table inet lossy {{ {' '.join(chains)} }}")
        try:
            yield
        finally:
            _run(*nft, "delete table inet lossy")

    def lose(self) -> None:
        """The host is no more: its processes end without a word to anybody."""
        _run("ip", "link", "set", self._port, "down")
        self._kill()

    def _kill(self) -> None:
        end = time.monotonic() + KILL_SECONDS
        while (pids := self._pids()) and time.monotonic() < end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self._server is not None:
            self._server.wait(KILL_SECONDS)

    def remove(self) -> None:
        """End its processes, and forget it, however far its making has come."""
        if Path(f"/sys/class/net/{self._port}").exists():
            _run("ip", "link", "delete", self._port)  # here and now, where the namespace would take a while
        if Path(f"/run/netns/{self._namespace}").exists():
            self._kill()
            _run("ip", "netns", "delete", self._namespace)


class Hosts:
    """Hosts `host1`, `host2` and so on, a switch between them, and a key that opens them all to each other.

    Attributes:
        all: the hosts.
        own_address: of the process that has made them, as they see it.
        path: a folder that must come first in `PATH`, with an `ssh` that has the key.
    """

    def __init__(self, count: int) -> None:
        with contextlib.ExitStack() as made:
            self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
            made.callback(shutil.rmtree, self.folder, ignore_errors=True)
            lock, number = _claim()
            made.enter_context(lock)
            network, bridge = f"{_NETWORK}.{number}", _bridge(number)
            self.own_address = f"{network}.254"
            _run("ip", "link", "add", bridge, "type", "bridge")
            made.callback(_run, "ip", "link", "delete", bridge)
            _run("ip", "address", "add", f"{self.own_address}/24", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
            self.all = [Host(f"host{i + 1}", f"{bridge}h{i}", f"{network}.{i + 1}") for i in range(count)]
            self._prepare_ssh()
            for host in self.all:
                made.callback(host.remove)
                host.connect(bridge)
                host.serve(self.folder)
            self._await_servers()
            self._made = made.pop_all()

    def _await_servers(self) -> None:
        end = time.monotonic() + START_SECONDS
        for host in self.all:
            while not host.is_serving():
                if time.monotonic() > end:
                    log = (self.folder / f"{host.name}.log").read_text()
                    raise RuntimeError(f"the SSH server of {host.name} does not answer: {log}")
                time.sleep(0.02)

    def _prepare_ssh(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # without which the server does not start
        key = self.folder / "key"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        server = [
            f"HostKey {key}",
            f"AuthorizedKeysFile {key}.pub",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "PermitRootLogin prohibit-password",
            "MaxStartups 100",
        ]
        (self.folder / "sshd_config").write_text("\n".join(server) + "\n")
        client = [
            f"IdentityFile {key}",
            "IdentitiesOnly yes",
            "UserKnownHostsFile /dev/null",
            "StrictHostKeyChecking no",
            "LogLevel ERROR",
            "ServerAliveInterval 5",  # so that a launcher learns of a host that is lost: docs/reliability.md
            "ServerAliveCountMax 2",
        ]
        (self.folder / "ssh_config").write_text("\n".join(client) + "\n")
        names = [f"{host.address} {host.name}" for host in self.all]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        self.path = self.folder / "bin"
        self.path.mkdir()
        ssh = self.path / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)

    def remove(self) -> None:
        """End all that runs there, and leave nothing behind. A second call does nothing."""
        self._made.close()


def _claim() -> tuple[BinaryIO, int]:
    """The number of a network that no other process has, and what keeps it. What an owner has left that was killed goes."""
    for number in range(_NETWORKS):
        # Not in /tmp, where somebody else may have made it.
        file = Path(f"/run/horovod-partial-hosts.{number}").open("ab")  # noqa: SIM115 (its owner closes it)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        _sweep(_bridge(number))
        return file, number
    raise RuntimeError("all networks are in use")


def _bridge(number: int) -> str:
    return f"hvd{number}"


def _sweep(bridge: str) -> None:
    for namespace in Path("/run/netns").glob(f"{bridge}h*"):
        Host("", namespace.name, "").remove()
    if Path(f"/sys/class/net/{bridge}").exists():
        _run("ip", "link", "delete", bridge)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
