"""Runs a program that was written for Horovod, with this package in Horovod's place: `horovod-partial run`."""

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

# Environment variables in which launchers tell a process its rank. Horovod itself knows the rank only after `init`.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def run(program: str, arguments: Sequence[str], *, is_module: bool, settings: Mapping[str, str]) -> None:
    """Run a program in the same way as the command `python`; if `is_module`, in the same way as `python -m`.

    `settings` has settings of this package for the program, by their names without `HOROVOD_PARTIAL_`.
    """
    os.environ.update({PREFIX + name: value for name, value in settings.items()})
    stand_in.install(_tell)
    sys.argv = [program, *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")  # the program's `__main__`, until the process ends
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            # Use a private function of runpy, because the public ones restore the old `__main__` after the program.
            runpy._run_module_as_main(program)  # type: ignore[attr-defined]
        else:
            main.__file__ = os.path.abspath(program)
            sys.path[0] = os.path.dirname(os.path.realpath(program))
            exec(compile(Path(program).read_bytes(), main.__file__, "exec"), vars(main))  # noqa: S102 (the user's program)
    except SystemExit as exit:
        if failure.is_failure(exit):
            failure.ends(exit)  # record the failure now, because Python calls no excepthook for a SystemExit
        raise


def _tell(front_end: str, names: Sequence[str]) -> None:
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank == "0":
        print(f"horovod-partial: of {front_end} these are ours: {', '.join(names)}", file=sys.stderr, flush=True)
