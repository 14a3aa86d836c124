"""What is missing for an installation is told in one line. `make matrix` installs everything, on bare systems."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from interpreter import run_command

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))
import install_horovod


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an interpreter that sees no installed package."""
    return run_command(sys.executable, "-S", *command, env=variables)


def refusal(*command: object, **variables: str) -> str:
    """The one line in which such a command says why it fails."""
    done = run(*command, **variables)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_no_framework() -> None:
    assert "has neither PyTorch nor TensorFlow; install one of them" in refusal(TOOLS / "install_horovod.py")


def test_no_horovod() -> None:
    assert re.search(r"There is no Horovod in.*install_horovod\.py", refusal(TOOLS / "horovod_info.py"))


@pytest.mark.parametrize("tool", ["install_horovod", "horovod_info"])
def test_a_python_that_is_not_supported_is_told_before_anything_else_is_looked_for(tool: str) -> None:
    program = "import runpy, sys; sys.version_info = (3, 9, 1); runpy.run_path(sys.argv.pop(), run_name='__main__')"
    told = refusal("-c", program, TOOLS / f"{tool}.py", PYTHONPATH=str(TOOLS))
    assert re.search(r"horovod-partial needs Python 3.10 to 3.14, and .* is Python 3", told)


def test_what_is_supported_is_the_same_everywhere() -> None:
    (oldest, newest) = (f"3.{minor}" for _, minor in install_horovod.PYTHONS)
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={oldest},<3.{install_horovod.PYTHONS[1][1] + 1}"' in project
    assert f"Python {oldest} to {newest}" in (ROOT / "docs" / "install.md").read_text()
    rows = json.loads((ROOT / "docs" / "versions.json").read_text()).values()
    for framework, column in (("torch", "PyTorch"), ("tensorflow", "TensorFlow")):
        tried = max(tuple(map(int, re.findall(r"\d+", row[column])[:2])) for row in rows)
        assert install_horovod.TRIED[framework] == tried


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages where a PyTorch of the future seems to be installed. Its headers ask for C++20."""
    folder = tmp_path / "packages"
    metadata = folder / "torch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    header = folder / "torch" / install_horovod.REFUSING_HEADERS["torch"]
    header.parent.mkdir(parents=True)
    header.write_text("#if defined(_MSVC_LANG) || __cplusplus < 202002L\n#error C++20\n#endif\n")
    (folder / "torch" / "__init__.py").write_text("__version__ = '9.9'\n")
    return folder


def script(folder: Path, name: str, text: str) -> None:
    """Make a double of a command."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_no_compiler(packages: Path) -> None:
    told = refusal(TOOLS / "install_horovod.py", "--gloo", PYTHONPATH=str(packages), PATH="/nowhere")
    assert "There is no C++ compiler c++; install g++, or set CXX" in told


def test_a_compiler_that_is_too_old_for_the_framework(packages: Path, tmp_path: Path) -> None:
    script(tmp_path / "bin", "c++", '[ "$1" = --version ] && echo "g++ 9.4.0" && exit; echo no such option >&2; exit 1')
    told = refusal(TOOLS / "install_horovod.py", "--gloo", PYTHONPATH=str(packages), PATH=str(tmp_path / "bin"))
    assert "torch 9.9 needs C++20, and c++ (g++ 9.4.0) cannot compile it (no such option). Install" in told


def test_mpi_is_asked_for_and_missing(packages: Path, tmp_path: Path) -> None:
    script(tmp_path / "bin", "c++", "exit 0")
    script(tmp_path / "bin", "make", "exit 0")
    done = run(TOOLS / "install_horovod.py", "--mpi", PYTHONPATH=str(packages), PATH=str(tmp_path / "bin"))
    assert done.returncode == 1
    assert "Building Horovod needs an MPI with its headers (libopenmpi-dev, openmpi-bin)" in done.stderr


@pytest.mark.parametrize("name", ["HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE"])
def test_gpus_are_asked_for_in_horovods_way(packages: Path, name: str) -> None:
    variables = {"PYTHONPATH": str(packages), "PATH": os.environ["PATH"], name: "NCCL"}
    done = run(TOOLS / "install_horovod.py", "--gloo", **variables)
    assert done.returncode == 1
    assert f"{name} is set in the environment; unset it, and for GPUs use --nccl" in done.stderr


@pytest.mark.parametrize(
    ("refusal", "standard"),
    [
        ("#if !defined(_MSC_VER) && __cplusplus < 201703L", 17),  # PyTorch 2.13
        ("    (!defined(_MSVC_LANG) && __cplusplus < 202002L)", 20),  # PyTorch 2.15
        ("#if _MSVC_LANG < 201703L", 17),  # TensorFlow 2.21
        ("#if _MSVC_LANG < 201402L", 17),  # older than what we need
        ("", 17),
    ],
)
def test_the_standard_is_that_of_the_frameworks_headers(
    packages: Path, monkeypatch: pytest.MonkeyPatch, refusal: str, standard: int
) -> None:
    (packages / "torch" / install_horovod.REFUSING_HEADERS["torch"]).write_text(f"#pragma once\n{refusal}\n")
    monkeypatch.setattr(install_horovod, "find_spec", lambda name: Spec(packages / name))
    assert install_horovod.cxx_standards(["torch"]) == {"torch": standard}


def test_installed_frameworks_have_the_headers_that_are_read() -> None:
    for name in install_horovod.frameworks():
        spec = install_horovod.find_spec(name)
        header = Path(spec.submodule_search_locations[0], install_horovod.REFUSING_HEADERS[name])
        assert re.search(r"(__cplusplus|_MSVC_LANG) < 20\d\d\d\dL", header.read_text())


class Spec:
    """A double of the specification of a package."""

    def __init__(self, folder: Path) -> None:
        self.submodule_search_locations = [str(folder)]


@pytest.fixture
def horovod(tmp_path: Path) -> Path:
    """A double of Horovod's source, with all that is patched. Its build prints what stands in output.txt, and fails."""
    tree = tmp_path / "horovod"
    for name, edits in install_horovod.patches({}).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("\n".join(old for old, _ in edits) + "\nif(NOT CMAKE_CUDA_COMPILER)\n")
    (tree / "horovod" / "__init__.py").write_text(f"__version__ = '{install_horovod.VERSION}'\n")
    (tree / "setup.py").write_text(
        "import pathlib, sys, setuptools\n"
        "if 'bdist_wheel' in sys.argv:\n"
        "    sys.exit(pathlib.Path('output.txt').read_text())\n"
        "setuptools.setup(name='horovod', version='0.28.1', packages=[])\n"
    )
    return tree


NO_CONCEPTS = """/packages/torch/tensor.h:12:2: error: 'concept' does not name a type
/usr/bin/ld: a later line
error: command 'cmake' failed with exit code 1"""


@pytest.mark.parametrize(
    ("output", "told", "remedy"),
    [
        (NO_CONCEPTS, "tensor.h:12:2: error: 'concept'", "an older version, since torch"),
        ("mpi.cc:3:10: fatal error: mpi.h: No such file", "mpi.h: No such file", "correct that, and run this again"),
        ("/usr/bin/ld: cannot find -lnccl\ncollect2: error: ld returned 1", "cannot find -lnccl", "correct that"),
        ("nvcc fatal   : Unsupported gpu architecture\nCalledProcessError: cmake", "Unsupported gpu", "correct that"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "Killed signal", "set MAKEFLAGS=-j1"),
        ("OSError: [Errno 28] No space left on device", "No space left", "HOROVOD_PARTIAL_CACHE to folders on another"),
        (
            "CMake Error at CMakeLists.txt:138 (find_package):\n\n  Could not find Threads",
            "(find_package): Could not find Threads",
            "correct that",
        ),
    ],
)
def test_a_failed_build_ends_with_its_first_error(
    packages: Path, horovod: Path, tmp_path: Path, output: str, told: str, remedy: str
) -> None:
    (horovod / "output.txt").write_text(f"warning: no errors here\n{output}\n")
    environment = os.environ | {
        "PYTHONPATH": str(packages),
        install_horovod.SOURCE_VARIABLE: str(horovod),
        install_horovod.CACHE_VARIABLE: str(tmp_path / "cache"),
    }
    done = run_command(sys.executable, TOOLS / "install_horovod.py", "--gloo", seconds=100, env=environment)
    assert done.returncode == 1
    assert "note: torch 9.9 is newer than 2." in done.stdout
    first, second = done.stderr.splitlines()
    assert "Horovod's build failed: " in first
    assert told in first
    assert remedy in second
    log = re.search(r"The whole output is in (.+)\.$", second)
    assert log
    assert output.splitlines()[0] in Path(log[1]).read_text()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The patched files of Horovod."""
    source, tree = install_horovod.source_tree(), tmp_path / "tree"
    for name in install_horovod.patches({}):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, tree / name)
    install_horovod.patch(tree, {"torch": 20})
    return tree


def test_each_framework_has_its_standard(tree: Path) -> None:
    found = {
        name: set(re.findall(r"set\(CMAKE_CXX_STANDARD (\d+)\)", (tree / name / "CMakeLists.txt").read_text()))
        for name in (".", "horovod/torch", "horovod/tensorflow")
    }
    assert found == {".": {"17"}, "horovod/torch": {"20"}, "horovod/tensorflow": {"17"}}


@pytest.mark.parametrize(("variable", "found"), [({}, "False"), ({"HOROVOD_GPU_OPERATIONS": "NCCL"}, "True")])
def test_without_nccl_pytorch_is_taken_for_one_without_cuda(
    tree: Path, tmp_path: Path, variable: dict[str, str], found: str
) -> None:
    # A double of a PyTorch for CUDA that finds a toolkit.
    (tmp_path / "torch" / "utils").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("class version:\n    cuda = '13.0'\n")
    (tmp_path / "torch" / "utils" / "cpp_extension.py").write_text("CUDA_HOME = '/usr/local/cuda'\n")
    question = re.search(r'-c "([^"]*import CUDA_HOME[^"]*)"', (tree / "cmake/Modules/FindPytorch.cmake").read_text())
    assert question
    done = run("-c", question[1], PYTHONPATH=str(tmp_path), **variable)
    assert done.stdout.strip() == found


def test_without_nccl_no_toolkit_is_looked_for(tree: Path, tmp_path: Path) -> None:
    # What Horovod's build does about CUDA, run by CMake with a compiler of CUDA that fails.
    text = (tree / "CMakeLists.txt").read_text()
    begin, end = text.index("if(DEFINED ENV{HOROVOD_CUDA_HOME})"), text.index("macro(ADD_CUDA)")
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.22)\nproject(double LANGUAGES CXX)\n{text[begin:end]}"
    )
    script(tmp_path / "bin", "nvcc", "touch $(dirname $0)/called; exit 1")
    scripts = sysconfig.get_path("scripts")
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{scripts}:{os.environ['PATH']}"}
    command = ["cmake", "-G", "Ninja", "-S", str(tmp_path), "-B", str(tmp_path / "build")]
    done = run_command(*command, env=environment)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "bin" / "called").exists()
    subprocess.run([*command, "--fresh"], env=environment | {"HOROVOD_GPU_OPERATIONS": "NCCL"}, timeout=60, check=False)
    assert (tmp_path / "bin" / "called").exists(), "otherwise this test shows nothing"


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (
            '{"pytorch": "9.8", "dummy": "none"}',
            "Horovod was built for torch 9.8, but 9.9 is installed; run `python tools/",
        ),
        ('{"pytorch": "9.9+cpu", "dummy": "none"}', "Horovod was built for torch 9.9+cpu, but 9.9 is installed"),
        ('{"dummy": "none"}', "works with neither torch nor TensorFlow (it was built without torch)"),
    ],
)
def test_a_horovod_for_another_version_of_the_framework_is_refused(packages: Path, metadata: str, told: str) -> None:
    installed = packages / "horovod-0.28.1.dist-info" / "METADATA"
    installed.parent.mkdir()
    installed.write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (packages / "horovod").mkdir()
    (packages / "horovod" / "__init__.py").write_text("raise AssertionError('its library is not loaded')\n")
    (packages / "horovod" / "metadata.json").write_text(metadata)
    variables = {"PYTHONPATH": str(packages), "PATH": os.environ["PATH"]}
    assert told in refusal(TOOLS / "horovod_info.py", packages / "info", **variables)
    assert not (packages / "info").exists()
