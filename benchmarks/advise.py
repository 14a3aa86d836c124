"""Does `horovod-partial advise` tell the truth? Rates that it predicts from a recording under Full, against measured ones.

    .venv/bin/python benchmarks/advise.py [--json FILE] [--transport gloo] [--base 0.1] [--steps 100]

In each of ten scenarios (harness/scenarios.py), or with the steps of a production job (`--scenarios sequences`), a step is a sleep and a small backward. The ranks train under Full, recorded,
and then under each other policy, with the same sleeps. Under work sharing a step is divided into micro-batches, and each
sleeps its part of what its rank sleeps in that step. What a micro-batch takes besides is measured first, and told to the
prediction. The first step of an arm is not slow, and does not count: a recording cannot tell how long it took. A rate is
steps in a second, mean over the ranks of the time that each takes for its own steps. The sleeps leave the processor to the other ranks; the rest of a step does not, so with more
ranks than cores `--base` must be long against that.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from harness import scenarios

from horovod_partial.insight import recording
from horovod_partial.insight.advice import PASSES, advise, gradient_policies


def measure(
    folder: str, names: list[str], arms: list[tuple[str, str, int]], steps: int, base: float, seed: int
) -> tuple[dict[str, dict[str, float]], float]:
    """On every rank: steps in a second, by scenario and arm; and what a micro-batch takes besides its sleep, in seconds."""
    import torch

    import horovod_partial.torch as hvd
    from horovod_partial.torch.operations import runtime

    def mean_of_ranks(seconds: float) -> float:
        return float(hvd.allreduce(torch.tensor(seconds, dtype=torch.float64)))

    def made(policy: str, passes: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        named = model.named_parameters()
        return model, hvd.DistributedOptimizer(optimizer, named, sync=policy, backward_passes_per_step=passes)

    def seconds_besides() -> float:
        passes, sleep = 200, base / 8
        model, wrapped = made("full", passes)
        rows = torch.randn(4, 64)
        hvd.barrier()
        start = time.perf_counter()
        for _ in range(passes):
            time.sleep(sleep)
            model(rows).square().mean().backward()
        took = time.perf_counter() - start
        wrapped.step()
        return mean_of_ranks(took / passes - sleep)

    def train(seconds: Any, policy: str, passes: int = 1) -> float:
        model, wrapped = made(policy, passes)
        rows = torch.randn(4, 64)
        hvd.barrier()
        taken, start = 0, 0.0
        while taken <= len(seconds):
            if taken and not start:
                start = time.perf_counter()
            time.sleep((seconds[taken - 1] if taken else base) / passes)
            wrapped.zero_grad()
            model(rows).square().mean().backward()
            wrapped.step()
            taken += wrapped.updated if passes > 1 else 1
        took = time.perf_counter() - start
        wrapped.flush()
        return mean_of_ranks(took)

    split = seconds_besides()
    rates: dict[str, dict[str, float]] = {}
    for number, name in enumerate(names):
        drawn = scenarios.draw(name, steps=steps, ranks=hvd.size(), base=base, seed=seed)[:, hvd.rank()].tolist()
        train(drawn[:3], "solo")  # what a first step costs
        rates[name] = {}
        for index, (arm, policy, passes) in enumerate(arms):
            harness.progress("advise", number * len(arms) + index, len(names) * len(arms))
            if policy == "full":
                hvd.record(Path(folder) / name)
            rates[name][arm] = steps / train(drawn, policy, passes)
            if policy == "full":
                hvd.barrier()
                runtime.core.end_recording()
    return rates, split


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8)
    parser.add_argument("--steps", type=int, default=100, help="of each arm")
    parser.add_argument("--base", type=float, default=0.1, help="seconds of a step that is not slow")
    parser.add_argument("--seed", type=int, default=0, help="of the scenarios")
    parser.add_argument(
        "--scenarios",
        nargs="*",
        default=list(scenarios.SCENARIOS),
        help="by name; also sequences and one_worker_slowed (4 ranks)",
    )
    options = parser.parse_args()

    arms = [(policy, policy, 1) for policy in gradient_policies(options.ranks)]
    arms += [(f"work_sharing, K = {passes}", "work_sharing", passes) for passes in PASSES]
    with tempfile.TemporaryDirectory(prefix="advise-") as folder:
        measured, split = harness.launch(
            measure,
            ranks=options.ranks,
            transport=options.transport,
            timeout=3600.0,
            folder=folder,
            names=options.scenarios,
            arms=arms,
            steps=options.steps,
            base=options.base,
            seed=options.seed,
        )
        advice = {name: advise(recording.load(Path(folder) / name), split=split) for name in measured}
    figures: dict[str, Any] = {"ranks": options.ranks, "transport": options.transport, "split": split, "scenarios": {}}
    rows = []
    for name, rates in measured.items():
        predicted = {str(one): one.rate for one in advice[name].predictions}
        ratios = {policy: predicted[policy] / rate for policy, rate in rates.items()}
        best = max(rates, key=lambda policy: rates[policy])
        chosen = str(advice[name].chosen)
        loss = 1 - rates[chosen] / rates[best]
        figures["scenarios"][name] = {
            "measured": rates,
            "over_full": {policy: rate / rates["full"] for policy, rate in rates.items()},
            "predicted": predicted,
            "predicted_over_measured": ratios,
            "chosen": chosen,
            "loss": loss,
        }
        told = [f"{rates[policy]:.2f} ({ratios[policy] - 1:+.0%})" for policy, *_ in arms]
        rows.append([name, *told, chosen, best, f"{loss:.1%}"])
    harness.print_table(
        f"Steps in a second, and by how much the prediction was off; {options.ranks} ranks over {options.transport}",
        ["scenario", *(arm for arm, *_ in arms), "chosen", "best", "slower than best"],
        rows,
    )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
