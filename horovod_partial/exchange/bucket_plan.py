"""Which gradients travel together where nothing has been measured: the same for every framework."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


def plan(
    kinds: Sequence[Hashable], sizes: Sequence[int], groups: Iterable[Iterable[int]], bucket_bytes: float
) -> list[list[int]]:
    """Buckets of gradients of one kind, in reverse order, as backward makes them.

    Args:
        kinds: of each gradient, in the order of the model: what those in one bucket have in common, such as the dtype.
        sizes: of each gradient, in bytes.
        groups: buckets asked for by the user, as positions; what they leave out is packed by size.
        bucket_bytes: a bucket is closed when it has reached this size.

    Returns:
        The positions in each bucket.
    """
    remaining = list(range(len(kinds)))
    buckets: list[list[int]] = []
    for group in groups:
        wanted = set(group)
        for one in dict.fromkeys(kinds[i] for i in remaining if i in wanted):
            buckets.append([i for i in reversed(remaining) if i in wanted and kinds[i] == one])
        remaining = [i for i in remaining if i not in wanted]
    for one in dict.fromkeys(kinds[i] for i in remaining):
        bucket: list[int] = []
        size = 0
        for position in reversed([i for i in remaining if kinds[i] == one]):
            bucket.append(position)
            size += sizes[position]
            if size >= bucket_bytes:
                buckets.append(bucket)
                bucket, size = [], 0
        if bucket:
            buckets.append(bucket)
    return buckets
