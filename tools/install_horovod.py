"""Build Horovod 0.28.1 for the PyTorch and TensorFlow of this Python environment, and install it there.

    python install_horovod.py [--gloo] [--mpi] [--nccl] [--wheel-dir DIRECTORY]

Horovod's last release predates today's frameworks, CUDA and Python; what `PATCHES` changes in its build is all that it takes.
Without --gloo and --mpi it is built with Gloo and, where an MPI is found, with MPI. --nccl is for PyTorch on NVIDIA's GPUs: its
compiler and headers are those of HOROVOD_CUDA_HOME, of nvcc on the PATH, or of NVIDIA's packages in this environment. NCCL is
linked as a shared library, so that Horovod uses the NCCL that PyTorch has loaded; its header and the name to link against come
from HOROVOD_NCCL_HOME, from PyTorch's package, or from the system. No GPU is needed to build. The wheel is kept in a cache, and is not built twice. Two
ranks add a tensor up before it is said to be installed. --wheel-dir leaves the wheel there instead, for other machines of the
same kind.

The source comes from PyPI, checked by its hash, or offline from HOROVOD_PARTIAL_HOROVOD_SOURCE, a path to the archive or to an
unpacked tree. Standard library only: it can be fetched by itself.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
SOURCE_VARIABLE = "HOROVOD_PARTIAL_HOROVOD_SOURCE"
CACHE_VARIABLE = "HOROVOD_PARTIAL_CACHE"

# What is replaced in which file of Horovod.
PATCHES = {
    "CMakeLists.txt": [
        (
            "set(CMAKE_CXX_STANDARD 14)",
            # PyTorch 2.1 and TensorFlow 2.16 need C++17. Some headers get <string> and <stdexcept> by others, which no longer bring
            # them with GCC 14.
            "set(CMAKE_CXX_STANDARD 17)\n"
            + 'add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include string -include stdexcept>")',
        )
    ],
    "horovod/torch/CMakeLists.txt": [
        ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
        # Python 3.12 has no distutils.
        (
            "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
            "import sysconfig; print(sysconfig.get_path('include'))",
        ),
    ],
    # GCC 14 refuses an assignment to a constant member, even where nobody calls it.
    "third_party/flatbuffers/include/flatbuffers/stl_emulation.h": [
        ("  const size_type count_;", "  size_type count_;")
    ],
    # The XLA operations are for XLA's headers of their day.
    "horovod/tensorflow/CMakeLists.txt": [
        ('list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n', "")
    ],
    # CUDA 13's own headers need C++17.
    "horovod/common/ops/cuda/CMakeLists.txt": [("set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD 17)")],
}

# Horovod's setup.py predates setuptools 80. Its CMake files predate CMake 4, which takes them if it is asked to.
BUILD_TOOLS = {"cmake": "3.31.10", "setuptools": "79.0.1", "wheel": "0.48.0"}
OLD_CMAKE_FILES = {"CMAKE_POLICY_VERSION_MINIMUM": "3.5"}

TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm")  # packages that have it

CHECK = """
import {framework} as framework, horovod.{framework} as hvd
hvd.init()
total = hvd.allreduce(framework.ones([1000]) * (hvd.rank() + 1), op=hvd.Sum, name="check")
assert hvd.size() == 2 and abs(float(total[999]) - 3) < 1e-6, total
hvd.shutdown()
"""
CHECK_SECONDS = 120


class SetupError(Exception):
    """A reason why set-up or build cannot go on, in one sentence that says what to do."""


class Features(NamedTuple):
    """What Horovod is built with."""

    gloo: bool
    mpi: bool
    nccl: bool


# --- The source


def cache_dir() -> Path:
    """The folder for what is worth keeping between checkouts."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod-partial"
    return Path(os.environ.get(CACHE_VARIABLE) or default)


def source_tree() -> Path:
    """The root of an unpacked, unmodified Horovod source tree of exactly VERSION."""
    given = os.environ.get(SOURCE_VARIABLE)
    if given and Path(given).is_dir():
        return _checked_tree(Path(given))
    tree = cache_dir() / f"horovod-{VERSION}-{SHA256[:12]}"
    if not tree.is_dir():
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
            archive = _checked_archive(Path(given)) if given else download(Path(scratch))
            shutil.unpack_archive(archive, scratch)
            try:  # a rename is atomic, so a tree in the cache is always whole
                (Path(scratch) / f"horovod-{VERSION}").rename(tree)
            except OSError:
                if not tree.is_dir():  # else another process was faster
                    raise
    return tree


def _checked_tree(tree: Path) -> Path:
    init = tree / "horovod" / "__init__.py"
    match = re.search(r"__version__ = '(.+)'", init.read_text()) if init.is_file() else None
    if not match or match[1] != VERSION:
        found = f"Horovod {match[1]}" if match else "no Horovod"
        raise SetupError(
            f"{SOURCE_VARIABLE}={tree} holds {found}; point it to the source archive of Horovod {VERSION}."
        )
    return tree.resolve()


def _checked_archive(archive: Path) -> Path:
    if not archive.is_file():
        raise SetupError(f"{SOURCE_VARIABLE}={archive} does not exist; point it to horovod-{VERSION}.tar.gz.")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise SetupError(f"{archive} is not PyPI's horovod-{VERSION}.tar.gz: its SHA-256 is not {SHA256}.")
    return archive


def download(folder: Path) -> Path:
    """Fetch the archive into a folder.

    Raises:
        SetupError: it could not be fetched.
    """
    requirement = folder / "horovod.txt"
    requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    command += ["--no-build-isolation", "--require-hashes", f"--requirement={requirement}", f"--dest={folder}"]
    with build_tools() as environment:  # pip asks the archive's setup.py for its name
        result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        reason = (result.stderr.strip() or "no reason given").rpartition("\n")[2]
        raise SetupError(
            f"pip could not download the source of Horovod {VERSION} ({reason}); set {SOURCE_VARIABLE} to "
            f"horovod-{VERSION}.tar.gz from PyPI, or to an unpacked copy."
        )
    return folder / f"horovod-{VERSION}.tar.gz"


# --- The build


def run(*command: object, **options: object) -> None:
    """Run a command, shown first."""
    line = [str(word) for word in command]
    print("+", *line, flush=True)
    subprocess.run(line, check=True, **options)  # type: ignore[call-overload]


def pip(*arguments: object, **options: object) -> None:
    """Run this environment's pip."""
    run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments, **options)


def digest(*parts: object) -> str:
    """A short name for a combination of inputs."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def mpi_version() -> str:
    """The first line of `mpirun --version`, or nothing where no MPI can be compiled against."""
    if not (shutil.which("mpicxx") and shutil.which("mpirun")):
        return ""
    result = subprocess.run(["mpirun", "--version"], check=False, capture_output=True, text=True)
    return result.stdout.partition("\n")[0]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def frameworks() -> dict[str, str]:
    """The frameworks of this environment, with their versions.

    Raises:
        SetupError: there is none.
    """
    found = {"torch": _version("torch"), "tensorflow": next(filter(None, map(_version, TENSORFLOWS)), "")}
    if not any(found.values()):
        raise SetupError(
            f"{sys.executable} has neither PyTorch nor TensorFlow; install one of them, then run this again."
        )
    return {name: number for name, number in found.items() if number}


@contextmanager
def build_tools() -> Iterator[dict[str, str]]:
    """The environment variables with which Horovod's setup.py finds tools that it works with, installed for now if need be."""
    environment = dict(os.environ)
    environment["PATH"] = f"{sysconfig.get_path('scripts')}:{environment.get('PATH', '')}"
    setuptools = _version("setuptools")
    there = {
        "cmake": shutil.which("cmake", path=environment["PATH"]),
        "setuptools": setuptools and int(setuptools.split(".")[0]) < 80,
        "wheel": _version("wheel"),
    }
    missing = [name for name, found in there.items() if not found]
    if not missing:
        yield environment
        return
    with tempfile.TemporaryDirectory() as folder:
        pip("install", "--no-deps", "--target", folder, *(f"{name}=={BUILD_TOOLS[name]}" for name in missing))
        environment["PATH"] = f"{folder}/bin:{environment['PATH']}"
        environment["PYTHONPATH"] = f"{folder}:{environment.get('PYTHONPATH', '')}".rstrip(":")
        yield environment


def _nvidia_package(*names: str) -> Path | None:
    """The folder of NVIDIA's packages of this environment that has all these files, which has one name for each CUDA."""
    spec = find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    folders = [folder for root in roots for folder in sorted(Path(root).iterdir())]
    return next((folder for folder in folders if all((folder / name).exists() for name in names)), None)


def _toolkit() -> Path | None:
    """The folder of the toolkit whose nvcc is on the PATH, where there may be a script that calls it."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    plan = subprocess.run([nvcc, "--dryrun", "-E", "none.cu"], check=False, capture_output=True, text=True).stderr
    match = re.search(r"TOP=(.+)", plan)
    return Path(match[1]).resolve() if match else None


def gpu_variables(links: Path) -> dict[str, str]:
    """Where CMake finds CUDA's compiler and NCCL; in `links` are names that NVIDIA's packages lack, and linkers look for.

    Raises:
        SetupError: one of them is not there.
    """
    given = os.environ.get("HOROVOD_CUDA_HOME")
    home = Path(given) if given else _nvidia_package("bin/nvcc") or _toolkit()
    if home is None or not (home / "bin" / "nvcc").exists():
        raise SetupError(
            "--nccl needs CUDA's compiler: install its toolkit or NVIDIA's package nvidia-cuda-nvcc of PyTorch's CUDA version, "
            "or set HOROVOD_CUDA_HOME."
        )
    # In a package libraries have other names than in a toolkit, where CMake looks for them.
    if not (home / "lib64").exists() and (home / "lib").is_dir():
        (home / "lib64").symlink_to("lib")
        for library in home.glob("lib/libcudart.so.*"):
            (home / "lib" / "libcudart.so").symlink_to(library.name)
    variables = {
        "HOROVOD_CUDA_HOME": home,
        "CUDA_HOME": home,
        "CUDAToolkit_ROOT": home,
        "CUDACXX": home / "bin" / "nvcc",
    }
    nccl = os.environ.get("HOROVOD_NCCL_HOME") or _nvidia_package("include/nccl.h")
    if nccl is not None:
        variables["HOROVOD_NCCL_INCLUDE"] = Path(nccl) / "include"
        libraries = sorted(library for where in ("lib", "lib64") for library in Path(nccl, where).glob("libnccl.so*"))
        if not libraries:
            raise SetupError(
                f"{nccl} has no libnccl.so; set HOROVOD_NCCL_HOME to a folder with NCCL's include and lib."
            )
        links.mkdir(parents=True, exist_ok=True)
        (links / "libnccl.so").unlink(missing_ok=True)
        (links / "libnccl.so").symlink_to(libraries[0])
        variables["HOROVOD_NCCL_LIB"] = links
    return {name: str(value) for name, value in variables.items()}


def build_flags(found: dict[str, str], features: Features) -> dict[str, str]:
    """The variables by which Horovod's setup.py is told what to build."""
    chosen = {
        "PYTORCH": "torch" in found,
        "TENSORFLOW": "tensorflow" in found,
        "GLOO": features.gloo,
        "MPI": features.mpi,
        "MXNET": False,
        "NVTX": False,
    }
    flags = {f"HOROVOD_WITH_{name}" if given else f"HOROVOD_WITHOUT_{name}": "1" for name, given in chosen.items()}
    # Horovod would link NCCL's static library where there is one. The process would then hold two NCCLs: a private one, and
    # PyTorch's.
    return flags | ({"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"} if features.nccl else {})


def _require_compiler() -> None:
    there = {
        "a C++ compiler (g++, or what CXX names)": shutil.which(os.environ.get("CXX", "c++")),
        "make": shutil.which("make"),
        "Python's headers (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }
    missing = [name for name, found in there.items() if not found]
    if missing:
        raise SetupError(f"Building Horovod needs {' and '.join(missing)}; install that first.")


def wheel(features: Features) -> Path:
    """The wheel of a Horovod that fits this environment, from the cache or built now.

    Raises:
        SetupError: something that the build needs is missing.
    """
    found = frameworks()
    flags = build_flags(found, features)
    mpi = mpi_version() if features.mpi else ""
    if features.mpi and not mpi:
        raise SetupError(
            "--mpi needs mpicxx and mpirun; install an MPI with its headers (libopenmpi-dev, openmpi-bin)."
        )
    _require_compiler()
    architectures = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "") if features.nccl else ""
    machine = (sys.version, platform.machine(), platform.libc_ver())
    key = digest(SHA256, json.dumps(PATCHES), flags, found, mpi, architectures, *machine)
    folder = cache_dir() / "wheels" / key
    wheels = list(folder.glob("*.whl"))
    return wheels[0] if wheels else _build(folder, flags, features.nccl)


def _build(folder: Path, flags: dict[str, str], nccl: bool) -> Path:
    print(f"Building Horovod {VERSION} once for this machine: some 5 minutes on two cores.", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, build_tools() as environment:
        tree = Path(scratch) / "horovod"
        shutil.copytree(source_tree(), tree)
        _patch(tree)
        environment |= {"MAKEFLAGS": f"-j{min(os.cpu_count() or 1, 16)}", **OLD_CMAKE_FILES, **flags}
        if nccl:
            environment |= gpu_variables(Path(scratch) / "links")
            environment["PATH"] = f"{environment['CUDA_HOME']}/bin:{environment['PATH']}"
        pip("wheel", "--no-build-isolation", "--no-deps", f"--wheel-dir={scratch}", tree, env=environment)
        made = next(Path(scratch).glob("*.whl"))
        return made.rename(folder / made.name)  # a rename is atomic, so a wheel in the cache is always whole


def _patch(tree: Path) -> None:
    for name, edits in PATCHES.items():
        text = (tree / name).read_text()
        for old, new in edits:
            if old not in text:
                raise SetupError(f"{name} of Horovod {VERSION} has no line {old!r} to be patched.")
            text = text.replace(old, new)
        (tree / name).write_text(text)


# --- The installation


def check(found: Sequence[str], features: Features) -> None:
    """Let two ranks add a tensor up in the Horovod that has been installed.

    Raises:
        SetupError: they did not.
    """
    environment = os.environ | {"PATH": f"{sysconfig.get_path('scripts')}:{os.environ.get('PATH', '')}"}
    transports = [name for name in ("gloo", "mpi") if getattr(features, name)]
    for framework in found:
        program = CHECK.format(framework=framework)
        for transport in transports:
            more = ["--mpi-args=--allow-run-as-root --oversubscribe"] if transport == "mpi" else []
            command = ["horovodrun", f"--{transport}", *more, "-np", "2", sys.executable, "-c", program]
            try:
                result = subprocess.run(
                    command, check=False, capture_output=True, text=True, env=environment, timeout=CHECK_SECONDS
                )
            except subprocess.TimeoutExpired:
                raise SetupError(f"Two ranks of {framework} over {transport} did not end in time.") from None
            if result.returncode != 0:
                raise SetupError(f"Two ranks of {framework} over {transport} failed:\n{result.stdout}{result.stderr}")
            print(f"Two ranks of {framework} over {transport}: an allreduce gives the sum.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gloo", action="store_true", help="coordinate over Gloo, which needs nothing else")
    parser.add_argument("--mpi", action="store_true", help="coordinate over MPI")
    parser.add_argument("--nccl", action="store_true", help="reduce CUDA tensors with NCCL")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIRECTORY", help="put the wheel there, and install nothing")
    options = parser.parse_args()
    chosen = options.gloo or options.mpi
    features = Features(options.gloo or not chosen, options.mpi if chosen else bool(mpi_version()), options.nccl)
    made = wheel(features)
    if options.wheel_dir is not None:
        options.wheel_dir.mkdir(parents=True, exist_ok=True)
        print(shutil.copy(made, options.wheel_dir))
        return
    pip("install", "--force-reinstall", "--no-deps", made)
    pip("install", made)  # and what it needs
    check(list(frameworks()), features)
    print(f"Horovod {VERSION} is installed.")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"install_horovod: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"install_horovod: `{' '.join(map(str, error.cmd))}` failed; its output is above.")
