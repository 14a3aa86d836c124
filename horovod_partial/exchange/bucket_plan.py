"""Plans which gradients travel in one bucket, by their sizes. (The package `merging` plans by measured times.)"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


def plan(
    kinds: Sequence[Hashable], sizes: Sequence[int], groups: Iterable[Iterable[int]], bucket_bytes: float
) -> list[list[int]]:
    """Pack gradients into buckets in reverse order of the model, because backward computes them in that order.

    `kinds` (such as dtypes) and `sizes` (in bytes) have the order of the model. All gradients of a bucket have one
    kind. `groups` are the positions that the user wants in one bucket; a group of several kinds becomes several
    buckets. The remaining gradients are packed by size: a bucket is closed once its size has reached `bucket_bytes`.
    Returns the positions of the gradients in each bucket.
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
