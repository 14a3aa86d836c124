"""Names of what is exchanged, the same on every rank."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter

from horovod_partial.runtime import Runtime, Tenure


class InstanceNames:
    """Names of optimizers, which never repeat while Horovod is up, and count anew when it is initialised anew.

    Ranks that are new in an elastic job count from the start, and so do the others then. Optimizers that are alike are told
    apart by the order in which names are asked for, which must be the same on every rank; others may come in any order.
    Any thread may ask.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._tenure = Tenure(runtime)
        self._lock = threading.Lock()
        self._instances: Counter[tuple[str, str]] = Counter()

    def new(self, prefix: str, alike: str) -> str:
        """A name that no other has.

        Args:
            prefix: of the name.
            alike: what makes optimizers alike; the same text on every rank.
        """
        digest = hashlib.sha256(alike.encode()).hexdigest()[:8]
        with self._lock:
            if self._tenure.enter():
                self._instances.clear()
            self._instances[prefix, digest] += 1
            return f"{prefix}.{digest}.{self._instances[prefix, digest]}"
