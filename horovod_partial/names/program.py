"""Runs a program that was written for Horovod with ours in Horovod's place."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from horovod_partial.names import stand_in
from horovod_partial.runtime import failure
from horovod_partial.settings import PREFIX

# By which launchers tell a process its rank, before Horovod is there to be asked.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def run(program: str, arguments: Sequence[str], *, is_module: bool, settings: Mapping[str, str]) -> None:
    """Run a program as `python` would. What is pending at its end is delivered when the process ends, as always.

    Args:
        program: the path of a script or, with `is_module`, the name of a module.
        arguments: of the program.
        is_module: as `python -m`.
        settings: that the program finds, by their names without the prefix.
    """
    os.environ.update({PREFIX + name: value for name, value in settings.items()})
    stand_in.install(_tell)
    sys.argv = [program, *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")  # it stays so to the end of the process
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            runpy._run_module_as_main(program)  # type: ignore[attr-defined]  # runpy's public ways take `__main__` back
        else:
            main.__file__ = os.path.abspath(program)
            sys.path[0] = os.path.dirname(os.path.realpath(program))
            exec(compile(Path(program).read_bytes(), main.__file__, "exec"), vars(main))  # noqa: S102 (it is what was asked)
    except SystemExit as exit:
        if failure.is_failure(exit):
            failure.ends(exit)  # no hook of the interpreter's tells of it
        raise


def _tell(front_end: str, names: Sequence[str]) -> None:
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank == "0":
        print(f"horovod-partial: of {front_end} these are ours: {', '.join(names)}", file=sys.stderr, flush=True)
