"""How a thread waits where ranks outnumber cores: it sleeps, and leaves the processor to the ranks that compute.

Horovod's own wait polls in a loop and does not sleep. Our policies and the rivals in `baselines` sleep while they wait. So
`full` must sleep too, or the comparison is not fair.
"""

from __future__ import annotations

import time


def wait_asleep() -> None:
    """Let threads of this process sleep from now on while they wait for an operation of Horovod's own, in PyTorch."""
    from baselines.pairs import PAUSE
    from horovod.torch.mpi_ops import mpi_lib

    wait = mpi_lib.horovod_torch_wait_and_clear

    def wait_and_clear(handle: int) -> None:
        while not mpi_lib.horovod_torch_poll(handle):
            time.sleep(PAUSE)
        wait(handle)

    mpi_lib.horovod_torch_wait_and_clear = wait_and_clear
