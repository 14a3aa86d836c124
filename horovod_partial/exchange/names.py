"""Names of what is exchanged, the same on every rank."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter

from horovod_partial.runtime.runtime import Runtime
from horovod_partial.runtime.tenure import Tenure


class InstanceNames:
    """Names of optimizers. They never repeat within a generation, and count from 1 again in the next.

    (Ranks that are new in an elastic job count from 1, so the others must too.) Optimizers that are alike get numbers
    in the order of their calls of `new`, which must be the same on every rank. Optimizers that differ may come in any
    order. Any thread may call.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._tenure = Tenure(runtime)
        self._lock = threading.Lock()
        self._instances: Counter[tuple[str, str]] = Counter()

    def new(self, prefix: str, alike: str) -> str:
        """Return a new name.

        Args:
            prefix: the first part of the name.
            alike: a text, the same on every rank. Optimizers with the same text are numbered.
        """
        digest = hashlib.sha256(alike.encode()).hexdigest()[:8]
        with self._lock:
            if self._tenure.enter():
                self._instances.clear()
            self._instances[prefix, digest] += 1
            return f"{prefix}.{digest}.{self._instances[prefix, digest]}"
