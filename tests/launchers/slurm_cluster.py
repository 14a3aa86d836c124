"""A Slurm cluster for tests: a controller and three nodes, each on a host of its own (`harness.hosts`), with four CPUs."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import hosts

NODES = 3
START_SECONDS = 60.0
# Debian's packages, by a program of each.
PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "slurm-client": "srun", "munge": "munged"}

# Hosts share their files and processes: what a node writes carries its name, and no control group is needed to find tasks.
# A requeued job begins when its credentials have expired.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=host1
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
TmpFS={folder}/tmp.%n
NodeName=host[1-{nodes}] CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""


def unavailable() -> str | None:
    """Why there can be no cluster here, or None."""
    missing = [package for package, program in PACKAGES.items() if shutil.which(program) is None]
    if missing:
        return f"a Slurm cluster needs Debian's {' '.join(missing)}"
    return hosts.unavailable()


class Cluster:
    """A running cluster.

    Attributes:
        folder: its files and logs.
    """

    def __init__(self) -> None:
        self._hosts = hosts.Hosts(NODES)
        self.folder = self._hosts.folder
        self._servers: list[subprocess.Popen[bytes]] = []
        try:
            self._configure()
            self._serve(0, "munged", "--foreground", *self._options_of_munge())
            self._serve(0, "slurmctld", "-D")
            for number in range(NODES):
                self._serve(number, "slurmd", "-D")
            self._await_nodes()
        except BaseException:
            self.remove()
            raise

    def _configure(self) -> None:
        for name in ("state", *(f"{kind}.host{n + 1}" for n in range(NODES) for kind in ("spool", "tmp"))):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder, nodes=NODES))
        (self.folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # else it looks for one, and wants to find it
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.folder.chmod(0o755)  # munged wants its socket to be within reach of all

    def _options_of_munge(self) -> list[str]:
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        return [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]

    def _serve(self, number: int, *command: str) -> None:
        host = self._hosts.all[number]
        with (self.folder / f"{command[0]}.{host.name}.log").open("wb") as log:
            self._servers.append(
                subprocess.Popen(
                    host.command(command),
                    env=self._environment({}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _await_nodes(self) -> None:
        end = time.monotonic() + START_SECONDS
        while self.run(["sinfo", "-h", "-N", "-t", "idle"], seconds=START_SECONDS).stdout.count("host") < NODES:
            if time.monotonic() > end:
                logs = {path.name: path.read_text() for path in self.folder.glob("*.log")}
                raise RuntimeError(f"the cluster does not come up: {logs}")
            time.sleep(0.2)

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        """Of what runs there: nothing of another Slurm's, and no setting of the caller's."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD", "SLURM", "SBATCH"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), own["PATH"]])
        return own | {"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": path} | variables

    def run(
        self,
        command: Sequence[str],
        seconds: float,
        variables: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node. Jobs that are left when its time is up are cancelled."""
        command = self._hosts.all[0].command([*(["env", f"--chdir={folder}"] if folder else []), *command])
        environment = self._environment(variables or {})
        try:
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            self.run(["scancel", "--user=root"], seconds=START_SECONDS)
            raise AssertionError(f"{command} has not ended: {error.stdout!r} {error.stderr!r}") from None

    def remove(self) -> None:
        """End all that runs there, and leave nothing behind."""
        self._hosts.remove()
        for server in self._servers:
            server.wait()
