"""Set up a development environment: `bootstrap.py .venv` for `make setup`, or another one of `ENVIRONMENTS`.

Makes it with its pinned requirements, and installs a Horovod that is built for them with Gloo and, where an MPI is found, with
MPI. A second run finds its stamp and ends at once. Standard library only: it runs before anything is installed, and starts
itself again inside the environment as soon as there is one.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from install_horovod import Features, SetupError, digest, mpi_version, run, wheel


class Environment(NamedTuple):
    """What an environment is made from: names of files in `requirements`, and the newest Python that will do.

    With `nccl` its Horovod reduces CUDA tensors.
    """

    requirements: tuple[str, ...]
    constraints: str
    newest_python: tuple[int, int]
    nccl: bool = False


ENVIRONMENTS = {
    ".venv": Environment(("frameworks", "build", "runtime", "test", "lint"), "constraints", (3, 12)),
    ".venv-tf215": Environment(("frameworks-tf215", "build", "runtime", "test"), "constraints-tf215", (3, 11)),
    ".venv-gpu": Environment(("frameworks-gpu", "gpu", "build", "runtime", "test"), "constraints", (3, 12), nccl=True),
    ".venv-gpu211": Environment(
        ("frameworks-gpu211", "gpu", "build", "runtime", "test"), "constraints", (3, 12), nccl=True
    ),
}

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / sys.argv[1]
ENVIRONMENT = ENVIRONMENTS[sys.argv[1]]
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
PIP = (PYTHON, "-m", "pip", "--quiet", "--disable-pip-version-check")
REQUIREMENTS = ROOT / "requirements"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# Debian's packages, by a file that shows that they are there.
MPI_PACKAGES = {"openmpi-bin": "/usr/bin/mpirun", "libopenmpi-dev": "/usr/bin/mpicxx"}
TEST_PACKAGES = {
    "libgtest-dev": "/usr/include/gtest/gtest.h",
    "libgmock-dev": "/usr/include/gmock/gmock.h",
    "libbenchmark-dev": "/usr/include/benchmark/benchmark.h",
}


def pins(*names: str) -> str:
    """The text of requirement files."""
    return "".join((REQUIREMENTS / f"{name}.txt").read_text() for name in names)


def install_system_packages() -> None:
    """Install Debian's packages for MPI and the C++ tests as root; otherwise say what is missing."""
    wanted = {} if mpi_version() else dict(MPI_PACKAGES)
    wanted |= TEST_PACKAGES
    missing = [package for package, file in wanted.items() if not Path(file).exists()]
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        try:
            run("apt-get", "update", "-qq", env=environment)
            run("apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing, env=environment)
            missing = []
        except subprocess.CalledProcessError:
            pass
    if missing:
        print(f"note: not installed: {' '.join(missing)} (`apt-get install` them, then run `make setup` again).")
    if not mpi_version():
        print("note: no MPI found: Horovod is built with Gloo only, and everything over MPI will be skipped.")


def install_requirements() -> None:
    """Install everything that is pinned."""
    # torch alone is sought on PyTorch's index: pip asks an extra index for every package that it resolves, and waits for
    # each where the index cannot be reached. torch then still comes from whatever index or folder pip is configured with.
    torch = next(line for line in pins(*ENVIRONMENT.requirements).splitlines() if line.startswith("torch=="))
    run(*PIP, "install", "--no-deps", "--retries=1", "--timeout=20", f"--extra-index-url={TORCH_INDEX}", torch)
    files = [f"--requirement={REQUIREMENTS / name}.txt" for name in ENVIRONMENT.requirements]
    run(*PIP, "install", f"--constraint={REQUIREMENTS / ENVIRONMENT.constraints}.txt", *files)


def stamp() -> str:
    """What the environment was set up from."""
    return digest(
        *(path.read_text() for path in (Path(__file__), Path(__file__).parent / "install_horovod.py")),
        pins(*ENVIRONMENT.requirements, ENVIRONMENT.constraints),
        sys.version,
        mpi_version(),
    )


def main() -> None:
    if not (3, 10) <= sys.version_info[:2] <= ENVIRONMENT.newest_python:
        raise SetupError(
            f"Python {platform.python_version()} is not supported in {VENV.name}; add PYTHON=python3.11 to make, say."
        )
    if Path(sys.prefix) != VENV:
        if not (VENV / "bin" / "pip").exists():
            run(sys.executable, "-m", "venv", VENV)
        os.execv(PYTHON, [str(PYTHON), *sys.argv])
    if STAMP.exists() and STAMP.read_text() == stamp():
        return
    STAMP.unlink(missing_ok=True)
    install_system_packages()
    install_requirements()
    horovod = wheel(Features(gloo=True, mpi=bool(mpi_version()), nccl=ENVIRONMENT.nccl))
    run(*PIP, "install", "--no-deps", "--force-reinstall", horovod)
    run(VENV / "bin" / "horovodrun", "--check-build", stderr=subprocess.DEVNULL)  # TensorFlow greets on stderr
    STAMP.write_text(stamp())


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"setup: `{' '.join(error.cmd)}` failed; its output is above.")
