"""Ask the installed Horovod what it is, and write the answer for CMake and for the package's check at import.

`python tools/horovod_info.py DIRECTORY` writes horovod.cmake and _build_info.py there; without DIRECTORY it only sees whether there
is a Horovod that this package works with.
"""

from __future__ import annotations  # a Python that is too old can then be told so

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import install_horovod
from install_horovod import SetupError

# Printed as the last line of a process of its own: frameworks are large, talk on stdout, and may fail to load.
# NVTX has no question of its own, but it changes the layout of a tensor's entry; its handle is an exported symbol.
# Horovod's build leaves the versions of the frameworks in metadata.json. They are compared first, because Horovod's library may
# not load with another version of the framework.
QUESTION = """
import ctypes, json, pathlib, sys, {framework}
from importlib.util import find_spec
metadata = pathlib.Path(find_spec("horovod").submodule_search_locations[0], "metadata.json")
built_for = json.loads(metadata.read_text()).get("{key}")
if built_for != {framework}.__version__:
    print(json.dumps([built_for, {framework}.__version__]))
    sys.exit({other_version})
import horovod.{framework} as hvd
from horovod.{framework} import mpi_ops
features = ["mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl"]
built = [name for name in features if getattr(hvd, name + "_built")()]
if hasattr(mpi_ops._basics.MPI_LIB_CTYPES, "_ZN7horovod6common11NvtxOpRange15nvtx_ops_handleE"):
    built.append("nvtx")
flags = getattr({framework}, "sysconfig", None)  # TensorFlow's, for operations of its graphs
abi = flags.CXX11_ABI_FLAG if flags else {framework}.compiled_with_cxx11_abi()
flags = [flags.get_compile_flags(), flags.get_link_flags()] if flags else [[], []]
print(json.dumps([{framework}.__version__, int(abi), built, *flags]))
"""
METADATA_KEYS = {"torch": "pytorch", "tensorflow": "tensorflow"}
OTHER_VERSION = 3  # the question's exit status if Horovod was built for another version of the framework

ADVICE = (
    "run `python tools/install_horovod.py` (for GPUs with --gloo --nccl), which builds it for the frameworks that are there, "
    "then `pip install .` again"
)


class Answer(NamedTuple):
    """Of the installed Horovod: frameworks with their versions, features, and how to compile for it and for TensorFlow.

    PyTorch before 2.7 has the strings and lists of C++ before 2011, that is `cxx11_abi` 0, and so has the Horovod for it.
    """

    frameworks: dict[str, str]
    cxx11_abi: int
    features: list[str]
    compile_flags: list[str]
    link_flags: list[str]


def require_horovod() -> None:
    """Horovod's version is the one that this package works with.

    Raises:
        SetupError: it is another one, or there is none.
    """
    wanted = install_horovod.VERSION
    try:
        found = version("horovod")
    except PackageNotFoundError:
        raise SetupError(
            f"There is no Horovod in {sys.prefix}; {ADVICE}, and if it is elsewhere, add --no-build-isolation."
        ) from None
    if found != wanted:
        raise SetupError(f"Horovod {found} is installed, but this version works with {wanted} only; {ADVICE}.")


def ask_horovod() -> Answer:
    """What the installed Horovod was built for, and with."""
    answer, reason = Answer({}, 1, [], [], []), ""
    for framework in ("torch", "tensorflow"):
        question = QUESTION.format(framework=framework, key=METADATA_KEYS[framework], other_version=OTHER_VERSION)
        command = [sys.executable, "-c", question]
        process = subprocess.run(command, check=False, capture_output=True, text=True)
        if process.returncode == 0:
            found, *rest = json.loads(process.stdout.splitlines()[-1])
            if answer.frameworks and rest[0] != answer.cxx11_abi:
                raise SetupError(
                    "PyTorch and TensorFlow were compiled with different C++ ABIs, so one library cannot serve both: take "
                    "PyTorch 2.7 or newer, or have one of them in an environment of its own."
                )
            answer = Answer({**answer.frameworks, framework: found}, *rest)  # TensorFlow comes last, with its flags
        elif process.returncode == OTHER_VERSION:
            built_for, found = json.loads(process.stdout.splitlines()[-1])
            if built_for:
                raise SetupError(
                    f"The installed Horovod was built for {framework} {built_for}, but {found} is installed; {ADVICE}."
                )
            reason = reason or f"it was built without {framework}"
        else:
            reason = reason or process.stderr.strip().rpartition("\n")[2]
    if not answer.frameworks:
        raise SetupError(f"The installed Horovod works with neither torch nor TensorFlow ({reason}); {ADVICE}.")
    return answer


def write(directory: Path) -> None:
    """Write what CMake and the package need to know, leaving files alone that would not change."""
    answer = ask_horovod()
    # Of our sources only the operations of TensorFlow's graphs include headers of a framework.
    standard = install_horovod.cxx_standards(["tensorflow"])["tensorflow"]
    install_horovod.require_compiler(standard, "horovod-partial")
    directory.mkdir(parents=True, exist_ok=True)
    variables = {
        "HOROVOD_SOURCE": str(install_horovod.source_tree()),
        "HOROVOD_CXX11_ABI": str(answer.cxx11_abi),
        "TENSORFLOW_CXX_STANDARD": str(standard),
        "HOROVOD_FEATURES": ";".join(answer.features).upper(),
        "TENSORFLOW_COMPILE_FLAGS": ";".join(answer.compile_flags),
        "TENSORFLOW_LINK_FLAGS": ";".join(answer.link_flags),
    }
    if "cuda" in answer.features:
        gpu = install_horovod.gpu_variables(directory)
        variables |= {"CMAKE_CUDA_COMPILER": gpu["CUDACXX"], "CUDAToolkit_ROOT": gpu["CUDAToolkit_ROOT"]}
        variables |= {"NCCL_HEADERS": gpu["HOROVOD_NCCL_INCLUDE"]} if "HOROVOD_NCCL_INCLUDE" in gpu else {}
    files = {
        "horovod.cmake": "".join(f'set({name} "{value}")\n' for name, value in variables.items()),
        "_build_info.py": '"""Written by the build: the Horovod that the extensions were compiled for."""\n\n'
        f"HOROVOD_VERSION = {json.dumps(install_horovod.VERSION)}\n"
        f"FEATURES = {json.dumps(answer.features)}\n"
        f"FRAMEWORKS = {json.dumps(answer.frameworks)}\n",
    }
    for name, text in files.items():
        path = directory / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    try:
        install_horovod.require_python()
        require_horovod()
        if sys.argv[1:]:
            write(Path(sys.argv[1]))
    except SetupError as error:
        sys.exit(f"error: {error}")
