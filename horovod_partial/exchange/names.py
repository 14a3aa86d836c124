"""Makes names of optimizers that are the same on every rank."""

from __future__ import annotations

import hashlib
import itertools
import threading

from horovod_partial.runtime.runtime import Runtime
from horovod_partial.runtime.tenure import Tenure


class InstanceNames:
    """Makes names of optimizers. All names since the last `hvd.init()` are different.

    Optimizers that are alike are numbered from 1, in the order in which they are named. This order must be the same on
    every rank. Optimizers that differ may come in any order. After each `hvd.init()` numbers start from 1 again,
    because new ranks of an elastic job start from 1. Any thread may use this object.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._tenure = Tenure(runtime)
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def new(self, prefix: str, alike: str) -> str:
        """Return a new name. `alike` describes the optimizer, in the same words on every rank."""
        digest = hashlib.sha256(alike.encode()).hexdigest()[:8]
        names = (f"{prefix}.{digest}.{number}" for number in itertools.count(1))
        return next(name for name in names if self.take(name))

    def take(self, name: str) -> bool:
        """Reserve a name, also one from before the last `hvd.init()`. Returns whether the name was free."""
        with self._lock:
            if self._tenure.enter():
                self._taken.clear()
            is_free = name not in self._taken
            self._taken.add(name)
            return is_free
