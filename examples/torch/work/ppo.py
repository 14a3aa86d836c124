"""PPO with whole episodes, of which a few are very long: a rank's steps take as long as the episodes that it has met.

    horovodrun -np 4 python examples/torch/work/ppo.py --policy majority --rate 0.002 --seed 0

A craft must fly to a goal and stop there, in wind. How far that is follows a power law, so most episodes are short and some
are twenty times as long, whatever the policy has learnt. In each iteration a rank flies `EPISODES` episodes to their ends,
all at once, and takes `PASSES` steps with all that it has seen, by clipped PPO with generalised advantage estimation.

The reward of a time step is how much nearer the goal came, less a fare, and a bonus for stopping there. The quality is the
mean return of new episodes, in which the craft does what it thinks best.
"""

from __future__ import annotations

import job
import numpy as np
import torch
from torch import nn

import horovod_partial.torch as hvd

EPISODES, TESTS = 16, 256  # of a rank in an iteration; of all ranks, for the return
PASSES = 4
STEPS, RATE, LARGEST_NORM = 192, 0.002, 0.5
DISCOUNT, TRACE, CLIP, ENTROPY = 0.97, 0.95, 0.2, 0.01
NEAREST, FARTHEST, TAIL = 5.0, 300.0, 1.2  # distances, and the exponent of their power law
THRUST, DRAG, FARE, BONUS = 0.1, 0.9, 0.3, 5.0
HIDDEN, VALUE_SCALE = 128, 10.0
OBSERVATIONS, ACTIONS = 7, 5

PUSHES = THRUST * np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])


class Flights:
    """Episodes that are flown at the same time; those that have ended are dropped."""

    def __init__(self, count: int, generator: np.random.Generator) -> None:
        distance = np.minimum(NEAREST * (1 + generator.pareto(TAIL, count)), FARTHEST)
        angle = generator.uniform(0, 2 * np.pi, count)
        self._place = distance[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)  # the goal is at 0
        self._speed = np.zeros((count, 2))
        self._wind = generator.normal(0, 0.2 * THRUST, (count, 2))
        self._left = (3 * distance + 30).astype(int)  # time steps
        self.flying = np.arange(count)

    def observe(self) -> torch.Tensor:
        distance = np.linalg.norm(self._place, axis=1, keepdims=True)
        seen = [self._place / (distance + 1), np.log1p(distance), self._speed, self._wind / THRUST]
        return torch.from_numpy(np.concatenate(seen, axis=1)).float()

    def act(self, actions: np.ndarray) -> np.ndarray:
        """Fly on for a time step. Returns the rewards."""
        before = np.linalg.norm(self._place, axis=1)
        self._speed = DRAG * self._speed + PUSHES[actions] + self._wind
        self._place = self._place + self._speed
        self._left -= 1
        distance = np.linalg.norm(self._place, axis=1)
        stopped = (distance < 1) & (np.linalg.norm(self._speed, axis=1) < 0.5)
        fly_on = ~stopped & (self._left > 0)
        self._place, self._speed, self._wind = self._place[fly_on], self._speed[fly_on], self._wind[fly_on]
        self._left, self.flying = self._left[fly_on], self.flying[fly_on]
        return before - distance - FARE + BONUS * stopped


class Pilot(nn.Module):
    """What to do, and what will come of it."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(nn.Linear(OBSERVATIONS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), last)
            for last in (nn.Linear(HIDDEN, ACTIONS), nn.Linear(HIDDEN, 1))
        )

    def forward(self, seen: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        return torch.distributions.Categorical(logits=self.policy(seen)), VALUE_SCALE * self.value(seen)[:, 0]


def fly(pilot: Pilot, generator: np.random.Generator) -> tuple[torch.Tensor, ...]:
    """What was seen, done, how likely that was, its advantage and what the value should have been; over all time steps."""
    flights = Flights(EPISODES, generator)
    times = []
    with torch.no_grad():
        while len(flights.flying):
            flying, seen = flights.flying, flights.observe()
            choice, value = pilot(seen)
            action = choice.sample()
            reward = flights.act(action.numpy())
            times.append((flying, seen, action, choice.log_prob(action), value.numpy(), reward))
    next_value, trace = np.zeros(EPISODES), np.zeros(EPISODES)
    advantages = []
    for flying, *_, value, reward in reversed(times):
        trace[flying] = reward + DISCOUNT * next_value[flying] - value + DISCOUNT * TRACE * trace[flying]
        next_value[flying] = value
        advantages.append(torch.from_numpy(trace[flying]).float())
    seen, action, likely, value = (torch.cat([torch.as_tensor(time[i]) for time in times]) for i in (1, 2, 3, 4))
    advantage = torch.cat(advantages[::-1])
    return seen, action, likely, (advantage - advantage.mean()) / (advantage.std() + 1e-6), advantage + value


def loss_of(pilot: Pilot, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    seen, action, likely, advantage, target = batch
    choice, value = pilot(seen)
    ratio = (choice.log_prob(action) - likely).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    return -gain - ENTROPY * choice.entropy().mean() + ((value - target) / VALUE_SCALE).square().mean()


def returns(pilot: Pilot, rank: int, size: int) -> tuple[float, int]:
    """The sum over this rank's share of the tests, and how many these are."""
    flights, total = Flights(TESTS // size, np.random.default_rng(10_000 + rank)), 0.0
    with torch.no_grad():
        while len(flights.flying):
            total += flights.act(pilot.policy(flights.observe()).argmax(1).numpy()).sum()
    return total, TESTS // size


def main() -> None:
    options = job.options(__doc__, rate=RATE, steps=STEPS)
    hvd.init()
    torch.set_num_threads(1)
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(options.seed)
    model = Pilot()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=options.rate),
        model.named_parameters(),
        sync=options.policy,
        max_grad_norm=LARGEST_NORM,
    )
    hvd.follow_rounds(torch.optim.lr_scheduler.LambdaLR(optimizer, job.cosine(options.steps)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(1000 * (options.seed + 1) + rank)
    generator = np.random.default_rng(1000 * (options.seed + 1) + rank)

    clock = job.Clock(model, options.steps)
    for step in range(options.steps):
        clock.batch()
        if step % PASSES == 0:
            batch = fly(model, generator)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    optimizer.flush()
    clock.report(lambda: returns(model, rank, size), policy=options.policy, name="return", better="higher")


if __name__ == "__main__":
    main()
