"""Which NCCL Horovod uses, and whether a process holds two: with libraries that stand in for NCCL and for Horovod's."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from interpreter import run_command

from horovod_partial import _build_info as built
from horovod_partial.runtime import nccl

NCCL = "int ncclGetVersion(int* version) { *version = %d; return 0; }"
HOROVOD = "int ncclGetVersion(int*); int horovod_version(void) { int told; ncclGetVersion(&told); return told; }"
# A framework loads NCCL, as PyTorch does, and then Horovod's library comes.
PROGRAM = """
import ctypes, json, sys
framework, library = sys.argv[1:]
ctypes.CDLL(framework)
print(ctypes.CDLL(library).horovod_version())
import horovod.torch
from horovod_partial.runtime import nccl
print(nccl.describe("torch", nccl.of_horovod(library, 22703), nccl.loaded()))
"""


def compile_library(path: Path, source: str, *options: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), "-x", "none", *options]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return path


has_nccl = "nccl" in built.FEATURES
stands_in = pytest.mark.skipif(has_nccl, reason="this PyTorch needs a real NCCL")


@pytest.fixture
def framework(tmp_path: Path) -> Path:
    return compile_library(tmp_path / "framework" / "libnccl.so.2", NCCL % 22809, "-Wl,-soname,libnccl.so.2")


def told(framework: Path, horovod: Path) -> list[str]:
    # Not in the folder of the checkout, whose package would come before one that is installed.
    done = run_command(sys.executable, "-c", PROGRAM, framework, horovod, cwd=framework.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@stands_in
def test_a_shared_nccl_is_the_frameworks(framework: Path, tmp_path: Path) -> None:
    """Also where Horovod was linked with another file of this name."""
    other = compile_library(tmp_path / "toolkit" / "libnccl.so.2", NCCL % 22000, "-Wl,-soname,libnccl.so.2")
    horovod = compile_library(tmp_path / "horovod.so", HOROVOD, str(other))
    assert told(framework, horovod) == ["22809", f"Horovod for torch uses NCCL 2.28.9: {framework}"]


@stands_in
def test_a_static_nccl_is_a_second_one(framework: Path, tmp_path: Path) -> None:
    """Also where a library that Horovod is linked with, as PyTorch's are, is linked with the framework's NCCL."""
    torch = compile_library(tmp_path / "libtorch.so", "", "-Wl,--no-as-needed", str(framework))
    hidden = '__attribute__((visibility("hidden"))) '
    source = hidden + NCCL % 22703 + HOROVOD
    horovod = compile_library(tmp_path / "horovod.so", source, "-Wl,--no-as-needed", str(torch))
    assert told(framework, horovod)[:3] == [
        "22703",
        f"Horovod for torch uses NCCL 2.27.3: {horovod}",
        f"warning: a process of torch also holds NCCL 2.28.9: {framework}",
    ]


def test_versions() -> None:
    """The number of NCCL's header, before and since 2.9."""
    assert [nccl._text(number) for number in (2708, 20903, 22809, 23203)] == ["2.7.8", "2.9.3", "2.28.9", "2.32.3"]


@pytest.mark.skipif(not has_nccl, reason="this Horovod was built without NCCL")
class TestInstalledHorovod:
    """`make test-gpu-build` runs these, where Horovod has NCCL. They need no GPU."""

    def test_it_is_linked_with_a_shared_nccl(self) -> None:
        folder = find_spec("horovod").submodule_search_locations[0]  # type: ignore[union-attr, index]
        (library,) = Path(folder).glob("torch/mpi_lib_v2*.so")
        assert "[libnccl.so.2]" in run_command("readelf", "--dynamic", library).stdout
        symbols = run_command("nm", "--defined-only", library).stdout.splitlines()
        assert len(symbols) > 1000, "their names have been taken out, and the next line would say nothing"
        assert not [line for line in symbols if line.split()[-1].startswith(("nccl", "pnccl"))]

    def test_check_names_one(self, tmp_path: Path) -> None:
        command = shutil.which("horovod-partial")
        assert command is not None
        done = run_command(command, "check", seconds=100, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Horovod for torch uses NCCL 2." in done.stdout
        assert "warning" not in done.stdout
