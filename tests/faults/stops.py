"""Stops of this process by another one, as a shared machine has them."""

import os
import subprocess


def stop_for(seconds: float) -> None:
    """Stop this process soon, and let it go on later."""
    pid = os.getpid()
    subprocess.Popen(
        ["sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"],
        env={"PATH": os.environ["PATH"]},  # so that it is not taken for a process that the job has left
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
