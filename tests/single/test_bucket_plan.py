"""Which gradients travel together."""

from types import SimpleNamespace
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression
from hypothesis import given
from hypothesis import strategies as st

from horovod_partial.exchange.arguments import AVERAGE, SUM
from horovod_partial.exchange.bucket_options import pack, positions_of
from horovod_partial.torch.buckets import GradientBucket, kind


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def plan(
    listed: list[torch.nn.Parameter], groups: list[list[int]], bucket_bytes: float
) -> list[list[torch.nn.Parameter]]:
    sizes = [p.numel() * p.element_size() for p in listed]
    return [[listed[i] for i in bucket] for bucket in pack([*map(kind, listed)], sizes, groups, bucket_bytes)]


def sizes(buckets: list[list[torch.nn.Parameter]]) -> list[list[int]]:
    return [[p.numel() for p in bucket] for bucket in buckets]


def bucket_of(listed: list[torch.nn.Parameter], compression: type = Compression.none) -> GradientBucket:
    options: Any = SimpleNamespace(compression=compression, unscaled=False)
    return GradientBucket("b", listed, options, ())


def test_the_numbers_of_horovods_operations() -> None:
    assert (mpi_ops.Average, mpi_ops.Sum) == (AVERAGE, SUM)


def test_reverse_order_as_backward_makes_them() -> None:
    assert sizes(plan(parameters(1, 2, 3), [], 1e6)) == [[3, 2, 1]]


def test_a_bucket_is_closed_when_it_has_its_size() -> None:
    assert sizes(plan(parameters(1, 2, 3, 4), [], 5 * 4)) == [[4, 3], [2, 1]]
    assert sizes(plan(parameters(1, 2, 3, 4), [], 1)) == [[4], [3], [2], [1]]


def test_one_dtype_to_a_bucket() -> None:
    single, double = parameters(1, 2), parameters(3, dtype=torch.float64)
    buckets = plan([single[0], double[0], single[1]], [], 1e6)
    assert sorted(sizes(buckets)) == [[2, 1], [3]]
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)


def test_groups_of_the_user_come_first() -> None:
    assert sizes(plan(parameters(1, 2, 3, 4), [[0, 2]], 1e6)) == [[3, 1], [4, 2]]


def test_a_number_of_groups() -> None:
    assert positions_of(2, "abc", str) == [[0, 1], [2]]
    assert positions_of(0, "abc", str) == positions_of(None, "abc", str) == []


def test_nothing_to_reduce() -> None:
    assert plan([], [], 1e6) == []
    assert plan([], [[]], 1e6) == []


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 400))
def test_every_parameter_is_in_one_bucket(counts: list[int], bucket_bytes: int) -> None:
    all_parameters = parameters(*counts)
    buckets = plan(all_parameters, [], bucket_bytes)
    flat = [id(p) for bucket in buckets for p in bucket]
    assert flat == [id(p) for p in reversed(all_parameters)]
    assert all(sum(p.numel() * 4 for p in bucket[:-1]) < bucket_bytes for bucket in buckets)


def test_gradients_become_views_of_the_bucket() -> None:
    two, three = parameters(2, 3)
    bucket = bucket_of([three, two])
    two.grad, three.grad = torch.full((2,), 2.0), torch.full((3,), 3.0)
    assert not bucket.take(two)
    assert bucket.take(three)
    assert bucket.flat.tolist() == [3, 3, 3, 2, 2]
    bucket.flat.fill_(7)
    assert two.grad.tolist() == [7, 7]
    assert three.grad.tolist() == [7, 7, 7]


def test_a_missing_gradient_counts_as_zeros() -> None:
    (one,) = parameters(4)
    bucket = bucket_of([one])
    bucket.flat.fill_(9)
    assert bucket.take(one)
    assert one.grad.tolist() == [0] * 4


def test_a_sparse_gradient_is_made_dense() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.sparse_coo_tensor([[1]], [[5.0, 6.0]], (3, 2))
    bucket = bucket_of([weight])
    assert bucket.take(weight)
    assert bucket.flat.tolist() == [0, 0, 5, 6, 0, 0]


def test_bfloat16_travels_as_float32() -> None:
    (one,) = parameters(4, dtype=torch.bfloat16)
    assert bucket_of([one]).wire_dtype == torch.float32
    (one,) = parameters(4)
    assert bucket_of([one], Compression.fp16).wire_dtype == torch.float16
