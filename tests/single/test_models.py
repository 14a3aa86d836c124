"""Averages of models: which weights and tests of the papers, and which tensors travel."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod_partial.exchange.wp_sgd import average_converges, average_is_useful, estimate_contraction
from horovod_partial.torch.model_exchange import averaged_tensors
from horovod_partial.torch.model_operations import ModelBucket

# --- WP-SGD's tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "least"), [(4, 0.667), (8, 0.631), (20, 0.591)])
def test_useful_down_to_a_weight_of_the_slow_ranks(ranks: int, least: float) -> None:
    """papers.md 4.2: all ranks but the fastest miss one step, with that contraction."""
    steps = [1] + [0] * (ranks - 1)
    assert average_is_useful(steps, least + 0.001)
    assert not average_is_useful(steps, least - 0.001)


MISSED = [(4, 0.99999, 40546), (8, 0.99999, 46108), (20, 0.99999, 52531), (4, 0.999, 405), (8, 0.999, 461)]


@pytest.mark.parametrize(("ranks", "contraction", "missed"), [*MISSED, (20, 0.999, 525)])
def test_useful_up_to_a_number_of_missed_steps(ranks: int, contraction: float, missed: int) -> None:
    def useful(steps: int) -> bool:
        return average_is_useful([10**6] + [10**6 - steps] * (ranks - 1), contraction)

    assert useful(missed - 1)
    assert not useful(missed + 1)


def test_an_average_of_equal_work_is_useful() -> None:
    assert average_is_useful([5, 5, 5, 5], 0.5)
    assert not average_is_useful([5], 0.5)  # of one rank: it is that rank's model


def test_converges() -> None:
    assert average_converges([10, 10, 10, 10], 0.9)
    assert not average_converges([1, 1, 1, 1], 1.0)  # nothing contracts
    assert not average_converges([0, 0, 0, 0], 0.5)  # no step was taken
    # The mean's factor, k * r^s, must shrink: 4 * 0.9^13 is 1.02, 4 * 0.9^14 is 0.92.
    assert not average_converges([13, 0, 0, 0], 0.9)
    assert average_converges([100, 90, 95, 100], 0.9)
    assert not average_converges([100, 0, 0, 0], 0.9)  # sqrt(4) is not below 1


DRAWN = {"contraction": st.floats(0.8, 0.999), "floor": st.floats(0.0, 10.0), "count": st.integers(12, 40)}


@given(height=st.floats(1.0, 100.0), **DRAWN)
def test_estimate_of_a_known_contraction(contraction: float, floor: float, height: float, count: int) -> None:
    """The loss follows the square of the distance, above a floor that nobody knows."""
    losses = [floor + height * contraction ** (2 * step) for step in range(count)]
    assert estimate_contraction(losses) == pytest.approx(contraction, rel=1e-4)


@given(**DRAWN)
def test_estimate_where_the_loss_is_linear_in_the_distance(contraction: float, floor: float, count: int) -> None:
    """As of a hinge: the loss contracts as the distance does."""
    losses = [floor + 5 * contraction**step for step in range(count)]
    assert estimate_contraction(losses, loss="linear") == pytest.approx(contraction, rel=1e-4)


def test_estimate_of_gradient_descent() -> None:
    """Measured on what it is about: steps of SGD on a quadratic contract by 1 - lambda * eta."""
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.05)
    losses = []
    for _ in range(30):
        loss = 0.5 * 0.8 * weight.square().sum() + 7
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert estimate_contraction(losses) == pytest.approx(1 - 0.8 * 0.05, rel=1e-6)


@pytest.mark.parametrize(
    "losses",
    [
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        [6.0, 5.0, 4.0, 3.0, 2.0, 1.0],
        [1.0] * 9,
        [9.0, 8.0, 1.0, 1.0, 1.0, 1.0],
        [9.0, 8.0, 2.0, 2.0, 3.0, 3.0],
        [9.0, 9.0, 8.0, 8.0, 1.0, 1.0],
        [3.0, 2.0, 1.5, 1.2, math.nan, 1.0],
        [math.inf, 2.0, 1.5, 1.2, 1.1, 1.0],
    ],
    ids=["rising", "straight", "flat", "fallen", "risen again", "faster and faster", "nan", "inf"],
)
def test_no_estimate_of_what_does_not_decay(losses: list[float]) -> None:
    with pytest.raises(ValueError, match="do not decay exponentially: the means of their thirds"):
        estimate_contraction(losses)


@pytest.mark.parametrize("losses", [None, 3, ["a"] * 7, [None] * 7, float])
def test_no_estimate_of_what_is_no_number(losses: Any) -> None:
    with pytest.raises(ValueError, match="losses must be a sequence of numbers, not "):
        estimate_contraction(losses)


def test_no_estimate_of_too_few_losses_or_of_an_unknown_loss() -> None:
    with pytest.raises(ValueError, match="6 or more losses are needed, not 5"):
        estimate_contraction([5.0, 4.0, 3.5, 3.2, 3.1])
    with pytest.raises(ValueError, match="loss must be 'quadratic' or 'linear', not 'hinge'"):
        estimate_contraction([5.0, 4.0, 3.5, 3.2, 3.1, 3.05], loss="hinge")  # type: ignore[arg-type]


# --- What travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "wire"),
    [
        ([torch.float32, torch.float32], torch.float32),
        ([torch.float16, torch.bfloat16], torch.float32),
        ([torch.float16, torch.float32], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
        ([torch.bfloat16, torch.float64], torch.float64),
    ],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else "+".join(str(dtype) for dtype in value),
)
def test_a_bucket_gives_back_the_bits_that_it_took(dtypes: list[torch.dtype], wire: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(2, 3), (), (0,), (4,)]
    tensors = [torch.randn(shape).to(dtype) for dtype in dtypes for shape in shapes]
    before = [tensor.clone() for tensor in tensors]
    bucket = ModelBucket(tensors)
    assert bucket.flat.dtype == wire
    assert bucket.flat.shape == (2 * (6 + 1 + 0 + 4),)
    bucket.pack()
    assert bucket.flat.tolist() == [x for tensor in before for x in tensor.double().reshape(-1).tolist()]
    assert bucket.flat.data_ptr() not in [tensor.data_ptr() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    bucket.unpack()
    for tensor, old in zip(tensors, before, strict=True):
        assert tensor.dtype == old.dtype
        assert torch.equal(tensor, old)
    bucket.flat.add_(1)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_a_bucket_of_parameters() -> None:
    """They require a gradient, and need not be contiguous."""
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    images = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert not weight.is_contiguous()
    old = [weight.detach().clone(), images.detach().clone()]
    bucket = ModelBucket([weight, images])
    bucket.pack()
    assert not bucket.flat.requires_grad
    assert bucket.flat[:6].tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    bucket.flat.mul_(2)
    bucket.unpack()
    assert torch.equal(weight, 2 * old[0])
    assert torch.equal(images, 2 * old[1])
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert weight.requires_grad
    (weight.sum() + images.sum()).backward()


DTYPES = (torch.int64, torch.bool, torch.complex64)
WRONG = [({"dtype": dtype}, f"averages floating-point tensors, not {dtype}") for dtype in DTYPES]


@pytest.mark.parametrize(("options", "told"), [*WRONG, ({"device": "meta"}, "tensors on meta are not supported")])
def test_a_bucket_refuses_what_it_cannot_average(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ModelBucket([torch.zeros(2), torch.zeros(2, **options)])


class Model(torch.nn.Module):
    """One layer with buffers, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.linear(x)))


def stepped(make: type[torch.optim.Optimizer], **options: object) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    optimizer = make(model.parameters(), lr=0.01, **options)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def same(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(tensors) == len(expected) and all(a is b for a, b in zip(tensors, expected, strict=True))


TRAINED = ("linear.weight", "linear.bias", "norm.weight", "norm.bias")


def test_buffers_but_no_counters() -> None:
    model, optimizer = stepped(torch.optim.Adam)
    parameters = [dict(model.named_parameters())[name] for name in TRAINED]
    tensors = averaged_tensors(parameters, optimizer.state, ("parameters", "buffers"), model.named_buffers())
    assert same(tensors, [*parameters, model.norm.running_mean, model.norm.running_var])


@pytest.mark.parametrize(
    ("make", "options", "keys"),
    [
        (torch.optim.SGD, {}, []),
        (torch.optim.SGD, {"momentum": 0.9}, ["momentum_buffer"]),
        (torch.optim.Adam, {}, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.AdamW, {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (torch.optim.Adagrad, {}, ["sum"]),
        (torch.optim.RMSprop, {"centered": True}, ["grad_avg", "square_avg"]),
    ],
    ids=["sgd", "momentum", "adam", "amsgrad", "adagrad", "rmsprop"],
)
def test_state_but_no_counters(make: type[torch.optim.Optimizer], options: dict[str, object], keys: list[str]) -> None:
    model, optimizer = stepped(make, **options)
    parameters = [dict(model.named_parameters())[name] for name in TRAINED]
    tensors = averaged_tensors(parameters, optimizer.state, ("parameters", "state"), ())
    assert same(tensors, [*parameters, *(optimizer.state[p][key] for key in keys for p in parameters)])


def test_a_counter_of_steps_stays_with_a_parameter_of_one_number() -> None:
    """Adam's counter has the shape of such a parameter, and is no momentum."""
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam([weight])
    weight.square().backward()
    optimizer.step()
    state = optimizer.state[weight]
    assert state["step"].shape == weight.shape
    tensors = averaged_tensors([weight], optimizer.state, ("parameters", "state"), ())
    assert same(tensors, [weight, state["exp_avg"], state["exp_avg_sq"]])
