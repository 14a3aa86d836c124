"""A process set without Horovod."""

from horovod.common.process_sets import ProcessSet


class Ranks(ProcessSet):
    """So many ranks, as one of them sees them."""

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__(list(range(size)))
        self._seen = size, rank

    def included(self) -> bool:
        return True

    def size(self) -> int:
        return self._seen[0]

    def rank(self) -> int:
        return self._seen[1]
