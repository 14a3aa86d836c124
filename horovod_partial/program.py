"""Runs a program that was written for Horovod with ours in Horovod's place."""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Sequence

from horovod_partial import failure, stand_in
from horovod_partial.settings import PREFIX

# By which launchers tell a process its rank, before Horovod is there to be asked.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def run(program: str, arguments: Sequence[str], *, is_module: bool, sync: str | None) -> None:
    """Run a program as `python` would, and deliver what is pending when it has come to its end.

    Args:
        program: the path of a script or, with `is_module`, the name of a module.
        arguments: of the program.
        is_module: as `python -m`.
        sync: the policy where the program names none; by default the one of the settings.
    """
    if sync is not None:
        os.environ[PREFIX + "SYNC"] = sync
    stand_in.install(_tell)
    sys.argv = [program, *arguments]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as exit:
        if not failure.is_failure(exit):
            _end()
        raise
    _end()


def _tell(front_end: str, names: Sequence[str]) -> None:
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank == "0":
        print(f"horovod-partial: of {front_end} these are ours: {', '.join(names)}", file=sys.stderr, flush=True)


def _end() -> None:
    """What a program that knows nothing of us leaves undone, when all its threads have ended."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for ours in dict.fromkeys(stand_in.FRONT_ENDS.values()):
        module = sys.modules.get(ours)
        if module is not None and module.is_initialized():
            module.shutdown()
