"""Makes names of optimizers that are the same on every rank."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter

from horovod_partial.runtime.runtime import Runtime
from horovod_partial.runtime.tenure import Tenure


class InstanceNames:
    """Makes names of optimizers. No name comes twice in a generation of Horovod.

    Optimizers that are alike are numbered from 1, in the order in which they are named. This order must be the same on
    every rank. Optimizers that differ may come in any order. In each generation numbers start from 1 again, because ranks
    that are new in an elastic job start from 1. Any thread may use this object.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._tenure = Tenure(runtime)
        self._lock = threading.Lock()
        self._instances: Counter[tuple[str, str]] = Counter()

    def new(self, prefix: str, alike: str) -> str:
        """Return a new name. `alike` describes the optimizer, the same on every rank; equal texts are numbered."""
        digest = hashlib.sha256(alike.encode()).hexdigest()[:8]
        with self._lock:
            if self._tenure.enter():
                self._instances.clear()
            self._instances[prefix, digest] += 1
            return f"{prefix}.{digest}.{self._instances[prefix, digest]}"
