"""Build Horovod 0.28.1 for the PyTorch and TensorFlow of this Python environment, and install it there.

    python install_horovod.py [--gloo] [--mpi] [--nccl] [--wheel-dir DIRECTORY]

Horovod's last release predates today's frameworks, CUDA and Python. What `patches` changes in its build is all that it takes.
Without --gloo and --mpi it is built with Gloo and, where an MPI is found, with MPI. Without --nccl it is built without CUDA, even
if a toolkit is installed.

--nccl is for PyTorch on NVIDIA's GPUs. CUDA's compiler and headers are those of HOROVOD_CUDA_HOME, of nvcc on the PATH, or of
NVIDIA's packages in this environment. NCCL is linked as a shared library, so that Horovod uses the NCCL that PyTorch has loaded.
Its header and the name to link against come from HOROVOD_NCCL_HOME, from PyTorch's package, or from the system. No GPU is needed
to build.

The wheel is kept in a cache, and is not built twice. Two ranks add a tensor up before it is said to be installed. --wheel-dir
leaves the wheel there instead, for other machines of the same kind.

The source comes from PyPI, checked by its hash, or offline from HOROVOD_PARTIAL_HOROVOD_SOURCE, a path to the archive or to an
unpacked tree. Standard library only: it can be fetched by itself.
"""

from __future__ import annotations  # a Python that is too old can then be told so

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
SOURCE_VARIABLE = "HOROVOD_PARTIAL_HOROVOD_SOURCE"
CACHE_VARIABLE = "HOROVOD_PARTIAL_CACHE"

# The versions of Python, oldest and newest, and the newest version of each framework that this has been tried with.
PYTHONS = ((3, 10), (3, 14))
TRIED = {"torch": (2, 15), "tensorflow": (2, 21)}

# The header by which each framework refuses a compiler of an older C++ standard.
REFUSING_HEADERS = {
    "torch": "include/torch/csrc/api/include/torch/all.h",
    "tensorflow": "include/absl/base/policy_checks.h",
}
OLDEST_STANDARD = 17  # that of CUDA 13's headers, and of ours


def patches(standards: dict[str, int]) -> dict[str, list[tuple[str, str]]]:
    """What is replaced in which file of Horovod, so that it builds for each framework with its C++ standard, and by tools of today."""
    standard_of = {name: standards.get(name, OLDEST_STANDARD) for name in REFUSING_HEADERS}
    return {
        "CMakeLists.txt": [
            (
                "set(CMAKE_CXX_STANDARD 14)",
                # With GCC 14 to 16 Horovod's files no longer get these headers through others.
                f"set(CMAKE_CXX_STANDARD {OLDEST_STANDARD})\n"
                + 'add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include cstdint -include string -include stdexcept>")',
            ),
            # A toolkit that is installed but not wanted may be too old for the compiler, or incomplete.
            (
                "check_language(CUDA)\nif(NOT",
                "if(DEFINED ENV{HOROVOD_GPU_OPERATIONS})\n  check_language(CUDA)\nendif()\nif(NOT",
            ),
            ("if(NOT CMAKE_CUDA_COMPILER)", "if(NOT CMAKE_CUDA_COMPILER AND DEFINED ENV{HOROVOD_GPU_OPERATIONS})"),
        ],
        "horovod/torch/CMakeLists.txt": [
            ("set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {standard_of['torch']})"),
            # Python 3.12 has no distutils.
            (
                "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
                "import sysconfig; print(sysconfig.get_path('include'))",
            ),
        ],
        "cmake/Modules/FindPytorch.cmake": [
            (
                "import torch; from torch.utils.cpp_extension import CUDA_HOME; print(True if (",
                "import os, torch; from torch.utils.cpp_extension import CUDA_HOME; "
                + "print(True if ('HOROVOD_GPU_OPERATIONS' in os.environ and ",
            )
        ],
        # GCC 14 refuses an assignment to a constant member, even where nobody calls it.
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h": [
            ("  const size_type count_;", "  size_type count_;")
        ],
        "horovod/tensorflow/CMakeLists.txt": [
            ("set(CMAKE_CXX_STANDARD 17)", f"set(CMAKE_CXX_STANDARD {standard_of['tensorflow']})"),
            # The XLA operations are for XLA's headers of their day.
            ('list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n', ""),
        ],
        # CUDA 13's own headers need C++17.
        "horovod/common/ops/cuda/CMakeLists.txt": [("set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD 17)")],
    }


# Horovod's setup.py predates setuptools 80. Its CMake files predate CMake 4, which takes them if it is asked to.
BUILD_TOOLS = {"cmake": "3.31.10", "setuptools": "79.0.1", "wheel": "0.48.0"}
OLD_CMAKE_FILES = {"CMAKE_POLICY_VERSION_MINIMUM": "3.5"}

CHECK = """
import {framework} as framework, horovod.{framework} as hvd
hvd.init()
total = hvd.allreduce(framework.ones([1000]) * (hvd.rank() + 1), op=hvd.Sum, name="check")
assert hvd.size() == 2 and abs(float(total[999]) - 3) < 1e-6, total
hvd.shutdown()
"""
CHECK_SECONDS = 120
# Horovod's own binding arguments have a single dash each, which Open MPI 6 does not know.
BINDING = "--binding-args=--bind-to none --map-by slot"
MPI_ARGUMENTS = [BINDING, "--mpi-args=--allow-run-as-root --oversubscribe"]

# FAILURE matches the first line of a build's output that tells the reason. REMEDIES has the remedy for a text in that line.
FAILURE = re.compile(
    r"rror: (?!subprocess-exited-with-error)|CMake Error|undefined reference|ld: cannot find|nvcc fatal"
)
REMEDIES = {
    "Killed": "the compiler ran out of memory; set MAKEFLAGS=-j1, and run this again",
    "No space left": f"free some space, or set TMPDIR and {CACHE_VARIABLE} to folders on another disk",
}
OF_FRAMEWORKS = re.compile("/(torch|tensorflow)/")  # in the name of a file in which a compiler finds an error
GPU_VARIABLES = [
    f"HOROVOD_GPU_{name}" for name in ["OPERATIONS", "ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER"]
]


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
    try:
        with build_tools() as environment:  # pip asks the archive's setup.py for its name
            subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    except subprocess.CalledProcessError as error:
        reason = ((error.stderr or "").strip() or "no reason given").rpartition("\n")[2]
        raise SetupError(
            f"pip could not download the source of Horovod {VERSION} ({reason}); set {SOURCE_VARIABLE} to "
            f"horovod-{VERSION}.tar.gz from PyPI, or to an unpacked copy."
        ) from None
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


def _output(*command: object) -> str:
    """What a command prints, or nothing if it is not there."""
    try:
        return subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True).stdout
    except OSError:
        return ""


def mpi_version() -> str:
    """The first line of `mpirun --version`, or nothing where no MPI can be compiled against."""
    if not (shutil.which("mpicxx") and shutil.which("mpirun")):
        return ""
    return _output("mpirun", "--version").partition("\n")[0]


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
    from importlib.metadata import packages_distributions  # which older Pythons lack; they are refused before

    tensorflows = packages_distributions().get(
        "tensorflow", ()
    )  # tensorflow, tensorflow-cpu, tf-nightly or another one
    found = {"torch": _version("torch"), "tensorflow": next(filter(None, map(_version, tensorflows)), "")}
    if not any(found.values()):
        raise SetupError(
            f"{sys.executable} has neither PyTorch nor TensorFlow; install one of them, then run this again."
        )
    return {name: number for name, number in found.items() if number}


def require_python() -> None:
    """This Python is one of PYTHONS.

    Raises:
        SetupError: it is too old, or too new.
    """
    oldest, newest = (".".join(map(str, one)) for one in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise SetupError(
            f"horovod-partial needs Python {oldest} to {newest}, and {sys.executable} is Python {platform.python_version()}."
        )


def _files_of(framework: str, name: str) -> list[Path]:
    """The file of this name in a framework's package, found without an import; none if it has none."""
    spec = find_spec(framework)
    files = [Path(folder, name) for folder in (spec and spec.submodule_search_locations) or ()]
    return [file for file in files if file.is_file()]


def cxx_standards(names: Iterable[str]) -> dict[str, int]:
    """The C++ standard that each framework's headers ask for."""
    standards = {}
    for name in names:
        text = "".join(header.read_text() for header in _files_of(name, REFUSING_HEADERS[name]))
        years = re.findall(r"(?:__cplusplus|_MSVC_LANG) < 20(\d\d)\d\dL", text)
        standards[name] = max([OLDEST_STANDARD, *map(int, years)])
    return standards


def compiler() -> list[str]:
    """The C++ compiler, which CXX may name with a launcher or options."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def require_compiler(standard: int, user: str) -> None:
    """There is a compiler, and it has the C++ standard that `user` needs.

    Raises:
        SetupError: there is none, or it is too old.
    """
    command = compiler()
    if not shutil.which(command[0]):
        raise SetupError(f"There is no C++ compiler {command[0]}; install g++, or set CXX.")
    program = f"#if __cplusplus < 20{standard}00L\n#error C++{standard} is not complete\n#endif\n"
    tried = [*command, f"-std=c++{standard}", "-x", "c++", "-E", "-"]
    done = subprocess.run(tried, check=False, input=program, capture_output=True, text=True)
    if done.returncode != 0:
        has = _output(*command, "--version").partition("\n")[0] or "of unknown version"
        said = done.stderr.strip().rpartition("\n")[2]
        raise SetupError(
            f"{user} needs C++{standard}, and {' '.join(command)} ({has}) cannot compile it ({said}). Install a newer "
            "compiler, say g++-12, and set CXX=g++-12."
        )


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


def _cuda_home() -> Path:
    """The folder of CUDA's compiler.

    Raises:
        SetupError: there is none.
    """
    given = os.environ.get("HOROVOD_CUDA_HOME")
    home = Path(given) if given else _nvidia_package("bin/nvcc") or _toolkit()
    if home is None or not (home / "bin" / "nvcc").exists():
        raise SetupError(
            "--nccl needs CUDA's compiler: install its toolkit or NVIDIA's package nvidia-cuda-nvcc of PyTorch's CUDA version, "
            "or set HOROVOD_CUDA_HOME."
        )
    return home


def gpu_variables(links: Path) -> dict[str, str]:
    """Where CMake finds CUDA's compiler and NCCL; in `links` are names that NVIDIA's packages lack, and linkers look for.

    Raises:
        SetupError: one of them is not there.
    """
    home = _cuda_home()
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


def _require_tools(features: Features) -> None:
    there = {
        "make": shutil.which("make"),
        "Python's headers (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").is_file(),
        "an MPI with its headers (libopenmpi-dev, openmpi-bin)": not features.mpi or mpi_version(),
    }
    missing = [name for name, found in there.items() if not found]
    if missing:
        raise SetupError(f"Building Horovod needs {' and '.join(missing)}; install that first.")
    given = [name for name in GPU_VARIABLES if os.environ.get(name)]
    if given:
        raise SetupError(
            f"{given[0]} is set in the environment; unset it, and for GPUs use --nccl of install_horovod.py."
        )


def untried(found: dict[str, str]) -> str:
    """Which frameworks are newer than those that this has been tried with, in words; empty if none is."""
    newer = [
        f"{name} {number} is newer than {'.'.join(map(str, TRIED[name]))}"
        for name, number in found.items()
        if tuple(map(int, re.findall(r"\d+", number)[:2])) > TRIED[name]
    ]
    return f"{' and '.join(newer)}, the newest that this has been tried with" if newer else ""


def wheel(features: Features) -> Path:
    """The wheel of a Horovod that fits this environment, from the cache or built now.

    Raises:
        SetupError: something that the build needs is missing, or the build failed.
    """
    found = frameworks()
    if untried(found):
        print(f"note: {untried(found)}.", flush=True)
    standards = cxx_standards(found)
    for name, standard in standards.items():
        require_compiler(standard, f"{name} {found[name]}")
    _require_tools(features)
    flags = build_flags(found, features)
    tools: list[object] = [mpi_version() if features.mpi else "", *compiler(), _output(*compiler(), "--version")]
    if features.nccl:
        nvcc = _cuda_home() / "bin" / "nvcc"
        tools += [_output(nvcc, "--version"), os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "")]
    # Builds of PyTorch for other processors may have the same version.
    build = [file.read_text() for file in _files_of("torch", "version.py")]
    machine = (sys.version, platform.machine(), platform.libc_ver())
    key = digest(SHA256, json.dumps(patches(standards)), flags, found, build, *tools, *machine)
    folder = cache_dir() / "wheels" / key
    wheels = list(folder.glob("*.whl"))
    return wheels[0] if wheels else _build(folder, standards, flags, features.nccl, untried(found))


def _build(folder: Path, standards: dict[str, int], flags: dict[str, str], nccl: bool, untried: str) -> Path:
    print(f"Building Horovod {VERSION} once for this machine: some 5 minutes on two cores.", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    with tempfile.TemporaryDirectory(dir=folder) as scratch, build_tools() as environment:
        tree = Path(scratch) / "horovod"
        shutil.copytree(source_tree(), tree)
        patch(tree, standards)
        given = environment.get("MAKEFLAGS", "")
        if "-j" not in given or "--jobserver" in given:  # make itself sets it for what it starts
            environment["MAKEFLAGS"] = f"-j{min(os.cpu_count() or 1, 16)}"
        environment["LC_ALL"] = "C.UTF-8"  # errors in English, which FAILURE matches
        environment.pop("HOROVOD_CUDA_HOME", None)
        environment |= {**OLD_CMAKE_FILES, **flags}
        if nccl:
            environment |= gpu_variables(Path(scratch) / "links")
            environment["PATH"] = f"{environment['CUDA_HOME']}/bin:{environment['PATH']}"
        try:
            with log.open("w") as output:
                pip(
                    *("wheel", "--no-build-isolation", "--no-deps", f"--wheel-dir={scratch}", tree),
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        except subprocess.CalledProcessError:
            raise SetupError(explain(log, untried)) from None
        made = next(Path(scratch).glob("*.whl"))
        return made.rename(folder / made.name)  # a rename is atomic, so a wheel in the cache is always whole


def explain(log: Path, untried: str) -> str:
    """Why a build failed, from the first error in its output, and what to do."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = lines or ["pip ended without a message, say because the disk or the memory is full"]
    at = next((place for place, line in enumerate(lines) if FAILURE.search(line)), len(lines) - 1)
    first = " ".join(lines[at : at + (2 if "CMake Error" in lines[at] else 1)])
    remedy = next((text for sign, text in REMEDIES.items() if sign in first), "")
    if not remedy and untried and OF_FRAMEWORKS.search(first):
        remedy = f"install an older version, since {untried}"
    remedy = remedy or "correct that, and run this again"
    return f"Horovod's build failed: {first}\nWhat to do: {remedy}. The whole output is in {log}."


def patch(tree: Path, standards: dict[str, int]) -> None:
    """Change a copy of Horovod's source."""
    for name, edits in patches(standards).items():
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
            more = MPI_ARGUMENTS if transport == "mpi" else []
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
    require_python()
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
