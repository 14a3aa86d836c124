"""Set up a development environment: `bootstrap.py .venv` for `make setup`, or another one of `ENVIRONMENTS`.

Makes it with its pinned requirements, builds Horovod with Gloo and, where an MPI is found, with MPI, and installs it.
The built wheel is kept in a cache outside the checkout, so that only the first set-up on a machine pays for it.
A second run finds its stamp and ends at once. Standard library only: it runs before anything is installed, and starts
itself again inside the environment as soon as there is one.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import horovod_source
from horovod_source import SetupError


class Environment(NamedTuple):
    """What an environment is made from: names of files in `requirements`, and the newest Python that will do."""

    requirements: tuple[str, ...]
    constraints: str
    newest_python: tuple[int, int]


ENVIRONMENTS = {
    ".venv": Environment(("frameworks", "build", "runtime", "test", "lint"), "constraints", (3, 12)),
    ".venv-tf215": Environment(("frameworks-tf215", "build", "runtime", "test"), "constraints-tf215", (3, 11)),
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

FLAGS = ["HOROVOD_WITH_" + name for name in ("PYTORCH", "TENSORFLOW", "GLOO")]
FLAGS += ["HOROVOD_WITHOUT_" + name for name in ("MXNET", "NVTX")]

# Horovod 0.28.1 predates torch and TensorFlow that need C++17, and TensorFlow without the XLA headers of its day.
PATCHES = {
    "CMakeLists.txt": [("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")],
    "horovod/torch/CMakeLists.txt": [("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")],
    "horovod/tensorflow/CMakeLists.txt": [
        ('list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n', "")
    ],
}


def run(*command: object, **options: object) -> None:
    """Run a command, shown first."""
    line = [str(word) for word in command]
    print("+", *line, flush=True)
    subprocess.run(line, check=True, **options)  # type: ignore[call-overload]


def mpi_version() -> str:
    """The first line of `mpirun --version`, or nothing where no MPI can be compiled against."""
    if not (shutil.which("mpicxx") and shutil.which("mpirun")):
        return ""
    result = subprocess.run(["mpirun", "--version"], check=False, capture_output=True, text=True)
    return result.stdout.partition("\n")[0]


def digest(*parts: object) -> str:
    """A short name for a combination of inputs."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


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


def horovod_wheel() -> Path:
    """The wheel of the Horovod that fits this environment, from the cache or built now."""
    mpi = mpi_version()
    machine = (sys.version, platform.machine(), platform.libc_ver())
    frameworks = [version(name) for name in ("torch", "tensorflow-cpu")]
    flags = [*FLAGS, "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI"]
    key = digest(horovod_source.SHA256, PATCHES, flags, *frameworks, mpi, *machine)
    folder = horovod_source.cache_dir() / "wheels" / key
    wheels = list(folder.glob("*.whl"))
    return wheels[0] if wheels else build_horovod(folder, flags)


def build_horovod(folder: Path, flags: list[str]) -> Path:
    """Build the wheel of a patched Horovod into a folder."""
    print(f"Building Horovod {horovod_source.VERSION} once for this machine: some 5 minutes on two cores.", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tree = Path(scratch) / "horovod"
        shutil.copytree(horovod_source.source_tree(), tree)
        for name, edits in PATCHES.items():
            text = (tree / name).read_text()
            for old, new in edits:
                if old not in text:
                    raise SetupError(f"{name} of Horovod {horovod_source.VERSION} has no line {old!r} to be patched.")
                text = text.replace(old, new)
            (tree / name).write_text(text)
        environment = os.environ | {
            "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
            "MAKEFLAGS": f"-j{min(os.cpu_count() or 1, 8)}",
            **dict.fromkeys(flags, "1"),
        }
        run(*PIP, "wheel", "--no-build-isolation", "--no-deps", f"--wheel-dir={scratch}", tree, env=environment)
        wheel = next(Path(scratch).glob("*.whl"))
        return wheel.rename(folder / wheel.name)  # a rename is atomic, so a wheel in the cache is always whole


def stamp() -> str:
    """What the environment was set up from."""
    return digest(
        Path(__file__).read_text(), pins(*ENVIRONMENT.requirements, ENVIRONMENT.constraints), sys.version, mpi_version()
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
    run(*PIP, "install", "--no-deps", "--force-reinstall", horovod_wheel())
    run(VENV / "bin" / "horovodrun", "--check-build", stderr=subprocess.DEVNULL)  # TensorFlow greets on stderr
    STAMP.write_text(stamp())


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"setup: `{' '.join(error.cmd)}` failed; its output is above.")
