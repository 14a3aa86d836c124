"""An elastic job on a real Ray, one of whose workers is killed: `elastic_on_ray.py RESULT.json` writes what the ranks return."""

import json
import sys
from pathlib import Path

import ray
from horovod.ray import ElasticRayExecutor
from ray.cluster_utils import Cluster

# Horovod never again uses a host on which a worker has failed, so there are two.
SLOTS = {"127.0.0.1": 2, "127.0.0.2": 1}


def train() -> tuple[int, int, bool]:
    """Train, and come to an end with two ranks.

    Returns:
        Steps of the job, the number of ranks at its end, and whether all rounds were ours.
    """
    import os
    import signal

    import torch

    import horovod_partial.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, steps=0)

    @hvd.elastic.run
    def loop(state: hvd.elastic.TorchState) -> None:
        while state.steps < 40:
            state.optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            if state.steps == 12 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.2":
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.step()
            state.steps += 1
            if state.steps % 5 == 0:
                state.optimizer.flush()
                state.commit()
        state.optimizer.flush()

    loop(state)
    hvd.assert_replicas_equal(model, optimizer)
    return state.steps, hvd.size(), bool(hvd.partial_stats())


def main() -> None:
    cluster = Cluster()
    for address, slots in SLOTS.items():
        cluster.add_node(
            num_cpus=slots, node_ip_address=address, object_store_memory=80 * 2**20, include_dashboard=False
        )
    ray.init(address=cluster.address)
    settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=3, nics={"lo"}, elastic_timeout=60)
    executor = ElasticRayExecutor(settings, env_vars={"HOROVOD_PARTIAL_SYNC": "majority"})
    executor.start()
    results = executor.run(train)
    ray.shutdown()
    cluster.shutdown()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
