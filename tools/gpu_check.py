"""From a bare machine with a GPU to results: build Horovod with NCCL and this package there, and run both on CUDA tensors.

    tools/gpu_check.sh collect DIR [--architecture 90]     where there is a network: put into DIR what `all` needs
    tools/gpu_check.sh all --archives DIR [--seconds N]    where there is a GPU: everything, in one call
    tools/gpu_check.sh profile --archives DIR              in 8 minutes: the build, and where the time of a step goes
    tools/gpu_check.sh run PARTS                           some parts or steps again, `b,c.latency` say
    tools/gpu_check.sh store DIR                           keep what has been carried, where not all of it fits into one call

`all` needs PyTorch for CUDA, NumPy, pip, a C++ compiler, Python's headers, nvcc and a CMake, but no network. Its parts are

    build  an environment above that of `python3`, Horovod with NCCL over Gloo's controller, and this package
    a      one rank: every policy, on CUDA tensors
    b      the parallel tests on CUDA tensors, with 2 and with 4 ranks on one GPU
    c      the benchmarks overhead, latency, straggler and work_sharing
    d      compute-sanitizer's memcheck of a
    e      real training: images and tokens a second, and memory

and each consists of steps. `all` runs the build, and then the steps in the order of what they tell. `profile` needs the same.
It runs the build, the part `profile` (when the parts of a step begin and end), and c.overhead, for the time of a whole step
without its clocks. A step may take its share of the time that is left, and hands on what it does not take; one of the build
may take all of it. The file of results is written when a step begins, whenever it has measured something, and when it ends;
so after an interrupt it holds what has been found. A step that fails, or that has no time left, is written down as such, and
the next goes on, unless the build has failed. What is built stays in build/gpu-check, so a later `run` goes on from there.
The exit status is 0 if all steps have passed, and 130 after an interrupt.

Several ranks on one GPU need NCCL 2.30 or newer, which `collect` takes from PyPI. With --architecture the code for all
other GPUs is blanked in it, so that it compresses to a seventh of the package. Where NVIDIA's Multi-Process Service (MPS) is
installed, it is started for them and ended with them, so that the ranks really run side by side. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import platform
import shutil
import signal
import site
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import install_horovod
from install_horovod import SetupError

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "gpu-check"
ARCHIVES = STATE / "archives"  # what has been carried
VENV = STATE / "venv"
PYTHON = VENV / "bin" / "python"
NCCL_LIBRARY = STATE / "nccl" / "libnccl.so.2"
MPS = "nvidia-cuda-mps-control"
MPS_FOLDER = STATE / "mps"
LAST_WORDS_SECONDS = 10
LOOK_SECONDS = 0.5  # between two looks at what a step has measured
INTERRUPTED_STATUS = 130
TAIL = 20_000  # characters of a step's output that are kept

# What the build, the tests and the benchmarks import, besides PyTorch and NumPy; the versions are those of requirements/.
PACKAGES = ["cffi", "cloudpickle", "packaging", "psutil", "pyyaml", "pydantic-settings", "rich", "typer"]
PACKAGES += ["ninja", "pybind11", "scikit-build-core", "setuptools", "wheel", "pytest", "pytest-timeout"]
PINS = ["build", "runtime", "test", "constraints"]
NCCL_PACKAGE = "nvidia-nccl-cu13>=2.30"
PLATFORMS = ["manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014"]

# Several ranks on one GPU: they share its multiprocessors, and one that finds none left waits for ever.
SEVERAL_RANKS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
RANKS = 4
BUILD = "build."  # begins the names of the build's steps

# Of tests/parallel. What has never run on a GPU comes first.
NEW_TESTS = ["gpu_devices.py"]
NEW_TESTS += ["gpu_training.py::test_steps_on_a_side_stream"]
NEW_TESTS += ["gpu_training.py::test_captured_forward_and_backward_passes"]
NEW_TESTS += ["gpu_training.py::test_rounds_go_on_while_a_rank_captures"]
NEW_TESTS += ["gpu_training.py::test_capturing_a_step_is_refused"]
NEW_TESTS += ["gpu_training.py::test_results_on_the_time_of_the_gpu_are_refused"]
NEW_TESTS += ["gpu_training.py::test_every_rank_is_told_of_a_gpu_without_memory"]
TESTS = ["rounds.py", "conformance_rounds.py", "conformance_models.py", "conformance_invariants.py", "optimizer.py"]
TESTS += ["gpu_training.py", "groups.py", "work_sharing.py", "operations.py", "conformance_operations.py"]
POLICIES = [ROOT / "tests" / "parallel" / "programs" / "every_policy.py", "--device", "cuda"]
BENCHMARKS = {
    "c.overhead": ["overhead"],
    "c.latency": ["latency", "--skew-ranks", str(RANKS)],
    "c.straggler": ["straggler"],
    **{f"c.sharing_{ms}ms": ["work_sharing", "--micro-ms", ms] for ms in ("5", "20")},
    **{f"profile.{load}": ["gpu_profile", "--load", load] for load in ("resnet50", "small", "transformer")},
    "e.resnet50": ["gpu_training", "--model", "resnet50"],
    "e.transformer": ["gpu_training", "--model", "transformer"],
}

Action = Callable[["Step"], None]


class Interrupted(BaseException):
    """The call has been told to end."""


class Step:
    """One step while it runs.

    It has a file for its output and one for its figures. `look` is called from time to time while it waits for a command.
    """

    def __init__(self, name: str, deadline: float, look: Callable[[Step], None]) -> None:
        self.name = name
        self.deadline = deadline
        self.look = look
        self.mark = f"{os.getpid()}.{name}"  # in the environment of all that it starts
        self.log = STATE / f"{name}.log"
        self.json = STATE / f"{name}.json"
        self.log.write_text("")
        self.json.unlink(missing_ok=True)

    def run(self, *command: object, cwd: Path | None = None, **variables: object) -> None:
        """Run a command to its end, or to that of the time.

        Raises:
            SetupError: it failed, or did not end in time.
        """
        environment = os.environ | {
            "PATH": f"{PYTHON.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()),
            install_horovod.CACHE_VARIABLE: str(STATE / "cache"),
            install_horovod.SOURCE_VARIABLE: str(ARCHIVES / f"horovod-{install_horovod.VERSION}.tar.gz"),
            "GPU_CHECK_STEP": self.mark,
        }
        environment |= {name: str(value) for name, value in variables.items()}
        with self.log.open("a") as log:
            print("+", *command, file=log, flush=True)
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd or STATE,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = self._wait(process)
            finally:
                self._end_all()
        if status is None:
            raise SetupError("did not end in time")
        if status != 0:
            raise SetupError(f"ended with status {status}")

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """The status with which the process ended; None if it did not end in time."""
        while time.monotonic() < self.deadline:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(max(min(LOOK_SECONDS, self.deadline - time.monotonic()), 0))
            self.look(self)
        process.send_signal(signal.SIGINT)  # pytest says then what has failed so far
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_SECONDS)
        return None

    def _end_all(self) -> None:
        """End what a command has left: a rank that waits for ever would keep the GPU."""
        for entry in Path("/proc").iterdir():
            try:
                if f"GPU_CHECK_STEP={self.mark}\0".encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except (OSError, ValueError):  # no process, or it has ended meanwhile
                continue

    def gpu(self, *command: object, ranks: int, cwd: Path | None = None) -> None:
        """Run a command of the environment whose ranks use CUDA tensors."""
        if ranks == 1:
            self.run(*command, cwd=cwd)
            return
        if not NCCL_LIBRARY.exists():
            raise SetupError("several ranks on one GPU need NCCL 2.30 or newer; carry it, and run build.nccl")
        with multi_process_service() as variables:
            self.run(*command, cwd=cwd, **SEVERAL_RANKS, LD_PRELOAD=NCCL_LIBRARY, **variables)


@contextmanager
def multi_process_service() -> Iterator[dict[str, object]]:
    """Start MPS where it is installed, and end it. Gives the variables by which a process uses it."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(MPS_FOLDER), "CUDA_MPS_LOG_DIRECTORY": str(MPS_FOLDER)}
    environment = os.environ | variables
    MPS_FOLDER.mkdir(parents=True, exist_ok=True)
    if shutil.which(MPS) is None or subprocess.run([MPS, "-d"], check=False, env=environment).returncode != 0:
        yield {}
        return
    try:
        yield dict(variables)
    finally:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([MPS], check=False, env=environment, input=b"quit\n", timeout=LAST_WORDS_SECONDS)


# --- Build


def build_environment(step: Step) -> None:
    """An environment that has the packages of this Python's, and the carried wheels before them."""
    shutil.rmtree(VENV, ignore_errors=True)
    step.run(sys.executable, "-m", "venv", "--without-pip", VENV)
    # An environment that is made in another one sees that of the system, not that one.
    (own,) = VENV.glob("lib/python3*/site-packages")
    (own / "gpu_check.pth").write_text("\n".join([*site.getsitepackages(), ""]))
    pip(step, "--no-index", "--no-deps", "--no-compile", "--ignore-installed", *sorted(ARCHIVES.glob("*.whl")))


def build_horovod(step: Step) -> None:
    step.run(PYTHON, ROOT / "tools" / "install_horovod.py", "--gloo", "--nccl")


def build_package(step: Step) -> None:
    build = f"--config-settings=--global-option=build --build-base={STATE / 'package'}"
    pip(step, "--no-build-isolation", "--no-deps", "--force-reinstall", build, ROOT)


def pip(step: Step, *arguments: object) -> None:
    step.run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def build_nccl(step: Step) -> None:
    """Join NCCL's library from its pieces."""
    about = ARCHIVES / "nccl.json"
    if not about.exists():
        raise SetupError("there is no NCCL in the archives")
    wanted = json.loads(about.read_text())
    missing = [name for name in wanted["pieces"] if not (ARCHIVES / name).exists()]
    if missing:
        raise SetupError(f"pieces of NCCL have not been carried yet: {', '.join(missing)}")
    packed = b"".join((ARCHIVES / name).read_bytes() for name in wanted["pieces"])
    library = lzma.decompress(packed)
    if hashlib.sha256(library).hexdigest() != wanted["sha256"]:
        raise SetupError("NCCL's library is not what was collected; collect it again")
    NCCL_LIBRARY.parent.mkdir(exist_ok=True)
    NCCL_LIBRARY.write_bytes(library)
    step.json.write_text(about.read_text())


# --- On the GPU


def one_rank(step: Step) -> None:
    step.gpu(PYTHON, *POLICIES, ranks=1)


def memcheck(step: Step) -> None:
    # Calls that the driver refuses count for nothing: PyTorch and NCCL ask it for what it may lack, and we check ours.
    check = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "1"]
    step.gpu(*check, PYTHON, *POLICIES, "--steps", "2", ranks=1)


def tests(names: Sequence[str], ranks: int) -> Action:
    def run(step: Step) -> None:
        chosen = [f"tests/parallel/test_{name}" for name in names]
        options = [
            "--device=cuda",
            "--transport=gloo",
            f"--ranks={ranks}",
            "-v",
            "-rsf",
            "--maxfail=15",
            "-k",
            "not (eager or graph)",
        ]
        # Not `python -m pytest`, which finds the package of this folder first.
        step.gpu(PYTHON.parent / "pytest", *options, *chosen, ranks=ranks, cwd=ROOT)

    return run


def benchmark(program: str, *options: str) -> Action:
    def run(step: Step) -> None:
        command = [PYTHON, ROOT / "benchmarks" / f"{program}.py", *options, "--quick", "--json", step.json]
        step.gpu(*command, "--device", "cuda", "--transport", "gloo", "--ranks", RANKS, ranks=RANKS)

    return run


STEPS: dict[str, Action] = {
    "build.environment": build_environment,
    "build.horovod": build_horovod,
    "build.package": build_package,
    "build.nccl": build_nccl,
    "a.policies": one_rank,
    "b.new2": tests(NEW_TESTS, 2),
    "b.new4": tests(NEW_TESTS, 4),
    "b.2": tests(TESTS, 2),
    "b.4": tests(TESTS, 4),
    "d.memcheck": memcheck,
    **{name: benchmark(*command) for name, command in BENCHMARKS.items()},
}

# What `all` runs after the build, in the order of what it tells, and the share of the time that each step may take: about the
# seconds that it takes on a machine with 16 cores, and half as many again; more where that has never been measured.
SHARES = {
    "a.policies": 40.0,
    "b.new2": 150.0,
    "b.new4": 150.0,
    "b.4": 240.0,
    "b.2": 160.0,
    "e.resnet50": 100.0,
    "c.overhead": 100.0,
    "c.straggler": 80.0,
    "c.sharing_20ms": 70.0,
    "c.sharing_5ms": 60.0,
    "c.latency": 80.0,
    "d.memcheck": 60.0,
    "e.transformer": 80.0,
}
OTHER_SHARE = 80.0  # of steps that `all` does not run


# --- Running


def seconds_for(step: str, later: Sequence[str], left: float) -> float:
    """How long a step may take of the seconds that are left for it and for the later ones.

    A step of the build may take them all: nothing else runs without it.
    """
    if step.startswith(BUILD):
        return left
    share = SHARES.get(step, OTHER_SHARE)
    return left * share / (share + sum(SHARES.get(name, OTHER_SHARE) for name in later))


def run(steps: Sequence[str], file: Path, seconds: float) -> int:
    """Run the steps in order, in so much time, and write what becomes of them. Returns the exit status."""
    STATE.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    results: dict[str, Any] = {"steps": {}}
    if file.exists():
        results = json.loads(file.read_text())
    interrupted = False
    for number, name in enumerate(steps):
        begin = time.monotonic()

        def keep(step: Step, reason: str = "it has not ended", begin: float = begin) -> None:
            result = {"passed": not reason, "reason": reason, "seconds": round(time.monotonic() - begin, 1)}
            if step.json.exists():
                result["figures"] = json.loads(step.json.read_text())
            result["output"] = step.log.read_text(errors="replace")[-TAIL:]
            results["steps"][step.name] = result
            write(results, file)

        step = Step(name, begin + max(seconds_for(name, steps[number + 1 :], deadline - begin), 0.0), keep)
        keep(step)
        reason = "" if begin < deadline else "no time was left for it"
        try:
            if not reason:
                STEPS[name](step)
        except (SetupError, OSError) as error:
            reason = str(error)
        except Interrupted:
            reason, interrupted = "it was interrupted", True
        keep(step, reason)
        print(f"{name}: {reason or 'passed'}, {results['steps'][name]['seconds']} s", flush=True)
        if interrupted:
            return INTERRUPTED_STATUS
        if reason and name.startswith(BUILD):
            return 1
    results["machine"] = machine()
    write(results, file)
    return 0 if all(results["steps"][name]["passed"] for name in steps) else 1


def write(results: dict[str, Any], file: Path) -> None:
    """Replace the file at once, so that it is whole whenever this call ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.draft")
    draft.write_text(json.dumps(results, indent=2) + "\n")
    draft.replace(file)


QUESTION = """
import json, platform, torch
from importlib.metadata import version
answer = {name: version(name) for name in ("torch", "numpy", "horovod", "horovod-partial")}
answer |= {"python": platform.python_version(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
answer |= {"nccl_of_torch": ".".join(map(str, torch.cuda.nccl.version()))}
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    answer |= {"device": properties.name, "device_bytes": properties.total_memory}
print(json.dumps(answer))
"""


def machine() -> dict[str, Any]:
    """Versions and the device; what cannot be told is left out."""
    answer: dict[str, Any] = {"cores": os.cpu_count(), "kernel": platform.release()}
    questions: dict[str, list[object]] = {
        "versions": [PYTHON, "-c", QUESTION],
        "nvcc": ["nvcc", "--version"],
        "cmake": ["cmake", "--version"],
        "driver": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        "commit": ["git", "-C", ROOT, "rev-parse", "HEAD"],
    }
    for name, command in questions.items():
        try:
            told = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, cwd=STATE)
        except (OSError, subprocess.CalledProcessError):
            continue
        answer[name] = json.loads(told.stdout) if name == "versions" else told.stdout.strip()
    return answer


def steps_of(parts: str) -> list[str]:
    """The steps of the parts, in the order of the parts.

    Raises:
        SetupError: there is no such part.
    """
    chosen: list[str] = []
    for part in parts.split(","):
        steps = [name for name in STEPS if part in (name, name.partition(".")[0])]
        if not steps:
            raise SetupError(f"there is no part {part!r}; parts and steps are {', '.join(STEPS)}")
        chosen += steps
    return chosen


def store(folder: Path) -> None:
    """Keep what has been carried, for this call and later ones."""
    shutil.copytree(folder, ARCHIVES, dirs_exist_ok=True)


# --- Collecting


def collect(folder: Path, python: str, architecture: int | None, piece_mib: int) -> None:
    """Put into a folder what `run` needs.

    Raises:
        SetupError: something else is in the folder, or could not be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SetupError(f"{folder} is not empty; name a new folder")
    platforms = [f"--platform={name}_{platform.machine()}" for name in PLATFORMS]
    pins = [f"--constraint={ROOT / 'requirements' / name}.txt" for name in PINS]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    install_horovod.pip("download", *target, *pins, f"--dest={folder}", *PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(install_horovod.download(Path(scratch)), folder)
        install_horovod.pip("download", *target, "--no-deps", f"--dest={scratch}", NCCL_PACKAGE)
        (wheel,) = Path(scratch).glob("nvidia_nccl*.whl")
        with zipfile.ZipFile(wheel) as archive:
            library = bytearray(archive.read("nvidia/nccl/lib/libnccl.so.2"))
    if architecture is not None:
        blank_others(library, architecture)
    packed = lzma.compress(library)
    size = piece_mib << 20
    pieces = {f"libnccl.xz.{begin // size:02}": packed[begin : begin + size] for begin in range(0, len(packed), size)}
    for name, piece in pieces.items():
        (folder / name).write_bytes(piece)
    about = {"wheel": wheel.name, "architecture": architecture, "pieces": list(pieces)}
    about["sha256"] = hashlib.sha256(library).hexdigest()
    (folder / "nccl.json").write_text(json.dumps(about, indent=2) + "\n")
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size / (1 << 20):8.1f} MiB  {file.name}")


CONTAINER = struct.Struct("<IHHQ")  # of CUDA's code: magic number, version, bytes of this header and of all entries
MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of this header and of what follows, then the architecture
MACHINE_CODE = 2  # the kind; 1 is PTX


def blank_others(library: bytearray, architecture: int) -> None:
    """Write zeros over the code for other architectures. It stays where it is, so nothing else changes.

    Raises:
        SetupError: the library has no code for this one.
    """
    found = False
    for begin, end, kind, number in entries(library):
        if (kind, number) == (MACHINE_CODE, architecture):
            found = True
        else:
            library[begin:end] = bytes(end - begin)
    if not found:
        raise SetupError(f"NCCL has no machine code for sm_{architecture}")


def entries(library: bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Where each piece of code for GPUs begins and ends, its kind, and the architecture that it is for."""
    magic = MAGIC.to_bytes(4, "little")
    at = library.find(magic)
    while at >= 0:
        _, version, header, size = CONTAINER.unpack_from(library, at)
        if (version, header) != (1, CONTAINER.size):
            raise SetupError("NCCL's library holds code in a form that is not known; collect without --architecture")
        at += header
        end = at + size
        while at < end:
            kind, _, header, size, number = ENTRY.unpack_from(library, at)
            yield at + header, at + header + size, kind, number
            at += header + size
        at = library.find(magic, end)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="put into a folder what `run` needs, where there is a network")
    collecting.add_argument("folder", type=Path, metavar="DIR")
    collecting.add_argument("--architecture", type=int, metavar="NUMBER", help="of the GPU: 90 for sm_90; default: all")
    collecting.add_argument("--python", default=platform.python_version(), help="version of the GPU machine's Python")
    collecting.add_argument("--piece-mib", type=int, default=50, help="largest piece of NCCL's library")
    storing = commands.add_parser("store", help="keep what has been carried")
    storing.add_argument("folder", type=Path, metavar="DIR")
    everything = commands.add_parser("all", help="run everything, in one call")
    everything.add_argument("--archives", type=Path, metavar="DIR", help="what `collect` has made")
    profiling = commands.add_parser("profile", help="measure where the time of a step goes")
    profiling.add_argument("--archives", type=Path, metavar="DIR", help="what `collect` has made")
    running = commands.add_parser("run", help="run some parts or steps again")
    running.add_argument("parts", metavar="PARTS", help="their names, with commas between them")
    for command, seconds in ((everything, 540.0), (profiling, 470.0), (running, 540.0)):
        command.add_argument("--results", type=Path, metavar="FILE", default=STATE / "results.json")
        command.add_argument("--seconds", type=float, default=seconds, help="for all steps together")
    options = parser.parse_args(arguments)
    if options.command == "collect":
        collect(options.folder, options.python, options.architecture, options.piece_mib)
        return 0
    if options.command == "store":
        store(options.folder)
        return 0
    if options.command == "run":
        return run(steps_of(options.parts), options.results, options.seconds)
    if options.archives is not None:
        store(options.archives)
    chosen = list(SHARES) if options.command == "all" else steps_of("profile,c.overhead")
    return run([*steps_of("build"), *chosen], options.results, options.seconds)


def interrupt(*_: object) -> None:
    """A signal has come: the step that runs is to end."""
    raise Interrupted


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # also where the shell that started this has them ignored
        signal.signal(number, interrupt)
    try:
        sys.exit(main(sys.argv[1:]))
    except Interrupted:  # between two steps
        sys.exit(INTERRUPTED_STATUS)
    except SetupError as error:
        sys.exit(f"gpu_check: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"gpu_check: `{' '.join(map(str, error.cmd))}` failed; its output is above.")
