"""Finds out which NCCL a framework's Horovod uses in this process, and which others are loaded.

PyTorch and TensorFlow load `libnccl.so.2` themselves. A Horovod that is linked with that name shares their NCCL. A
Horovod that is linked with NCCL's static library has its own: `LD_PRELOAD` does not replace it, and the process holds
two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_NAME = "libnccl.so"  # the file name of NCCL's shared library, without the version


class Nccl(NamedTuple):
    """An NCCL library in this process: its version, such as `"2.28.9"`, and the file with its code."""

    version: str
    path: str


def of_horovod(library: str, compiled: int) -> Nccl:
    """Return the NCCL that reduces the tensors of a framework's Horovod, whose library must be loaded.

    `library` is its path, and `compiled` the number of its NCCL at compile time, from `horovod.torch.nccl_built()`.
    """
    from horovod_partial import _attach  # `_attach` can be imported only after Horovod

    for name in _attach.needed_libraries(library):
        if name.startswith(_NAME):
            return _shared(name)
    return Nccl(_text(compiled), library)


def loaded() -> list[Nccl]:
    """Return the shared libraries of NCCL that are loaded, ordered by path."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    return [_shared(path) for path in sorted(paths) if Path(path).name.startswith(_NAME)]


def describe(framework: str, own: Nccl, loaded: Sequence[Nccl]) -> str:
    """Say which NCCL a framework's Horovod uses, and warn if the process holds another one."""
    text = f"Horovod for {framework} uses NCCL {own.version}: {own.path}"
    for other in loaded:
        if other.path != own.path:
            text += (
                f"\nwarning: a process of {framework} also holds NCCL {other.version}: {other.path}\n"
                "  Settings, and a library in LD_PRELOAD, may then reach only one of the two. Build Horovod with NCCL as a\n"
                "  shared library: tools/install_horovod.py --nccl does that, and so does HOROVOD_NCCL_LINK=SHARED."
            )
    return text


def _shared(name: str) -> Nccl:
    """Return version and file of a loaded NCCL. `name` is its path, or the name that other libraries link to."""
    get_version = ctypes.CDLL(name).ncclGetVersion
    version = ctypes.c_int()
    get_version(ctypes.byref(version))
    return Nccl(_text(version.value), _file_of(get_version))


def _file_of(function: object) -> str:
    """Return the path of the file that a function of a shared library was loaded from."""
    address = ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.partition(" ")[0].split("-"))
        if begin <= address < end:
            return line[line.index("/") :]
    raise AssertionError("a function that is in no mapped file")


def _text(version: int) -> str:
    """Return the text of a version: "2.28.9" for NCCL's number 22809. Numbers before 2.9 have one digit less."""
    major = 10_000 if version >= 10_000 else 1_000
    return f"{version // major}.{version % major // 100}.{version % 100}"
