"""WAGMA-SGD: its experiments, and what of it is here.

.venv/bin/python benchmarks/papers wagma_sgd fig4
"""

from __future__ import annotations

import wagma_sgd_throughput as throughput
import wagma_sgd_training as training
from experiment import Experiment, Paper, Refusal

# Columns.
_TIMES = (
    "least",
    "first quartile",
    "median",
    "third quartile",
    "greatest",
    "mean",
    "slowest of 16 ranks over the mean",
)

PAPER = Paper(
    key="wagma_sgd",
    name="WAGMA-SGD",
    idea="averages of models in small groups that change, which do not wait either: [`GroupAverage`](models.md#groupaverage)",
    citation=(
        "Shigang Li, Tal Ben-Nun, Giorgi Nadiradze, Salvatore Di Girolamo, Nikoli Dryden, Dan Alistarh, Torsten "
        "Hoefler: *Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group "
        "Averaging*, IEEE TPDS 2021 ([arXiv:2005.00124](https://arxiv.org/abs/2005.00124))"
    ),
    implemented=(
        (
            "Wait-avoiding group allreduce (section 3.1)",
            "`hvd.average`, [averages of models](../models.md), `cpp/core`",
        ),
        ("Dynamic groups (section 3.2, algorithm 1)", "`hvd.Butterfly(size)`"),
        ("Algorithm 2, with S of the square root of P and tau of 10", "`hvd.GroupAverage()`"),
        ("Bounded staleness (section 4.1.2)", "`max_staleness`; an average of all ranks every `period` rounds"),
        (
            "Its rivals: D-PSGD, SGP, AD-PSGD, local SGD, eager-SGD",
            "`benchmarks/baselines`; at any scale `benchmarks/papers/rivals.py`",
        ),
    ),
    differs=(
        "Algorithm 1 as printed shifts its mask on and on, which for 8 ranks and groups of 4 makes pairs in iteration "
        + "1. The worked example does not, nor does the released code, nor `hvd.Butterfly`.",
        "A rank on time gets sum / S, as in algorithm 2. The released code always takes (sum + own) / (S + 1).",
        "The average comes after a rank's step, as in algorithm 2. The released code averages before it, so that "
        + "messages travel during backward. Here `step()` waits for the average by default. With "
        + '`overlap="gradient"` messages travel during the next forward and backward pass, and with `overlap=True` while '
        + "data is loaded.",
        "A coordinator starts the rounds of all groups at once, within Horovod's negotiation, in place of activations "
        + "along a butterfly.",
        "All ranks are averaged in every `period`-th round of the job. In the paper a rank is at it after as many "
        + "steps of its own, so that all wait for the slowest sum of ten steps; here a late rank has taken fewer.",
        "For a rank that has missed `max_staleness` rounds in a row all wait; the kept model of one that is out of "
        + "training is left out of its group's sum then.",
        "Numbers of ranks and groups need not be powers of two.",
        "All policies and rivals of an experiment use the same learning rate. It was not tuned for each. With plain SGD and equal "
        + "models, averaging all models after a step gives the same result as averaging the gradients at that rate. `waits` also "
        + "shows twice the rate.",
        "The rivals simulated as the paper has them keep all ranks in step. As their algorithms are written a rank "
        + "waits for its neighbours only: both are shown.",
    ),
    experiments=(
        Experiment(
            "wagma_sgd",
            "fig4",
            "Figure 4: throughput of ResNet-50 where two ranks are late",
            "simulated with 4 to 256 ranks, on two kinds of links; measured with 8 ranks",
            throughput.images,
            grids=(
                ("64 ranks, Piz Daint", "256 ranks, Piz Daint", "64 ranks, 10 Gbit/s", "256 ranks, 10 Gbit/s"),
                ("8 ranks: throughput over Full's",),
            ),
        ),
        Experiment(
            "wagma_sgd",
            "fig5",
            "Figure 5: accuracy over time where two ranks are late",
            "digits on 8 ranks in place of ResNet-50 on ImageNet. A step takes 31 ms, and in each step two ranks are late by 0.94 of "
            "that, as in the paper's figure 5; in figure 4 they are late by half a step",
            training.images,
            grids=(("speed-up over Full", "accuracy in % (paper: ImageNet, here: digits)"),),
        ),
        Experiment(
            "wagma_sgd",
            "waits",
            "What averages of all ranks cost",
            "the job of `fig5`, in groups of 4. The paper waits for all ranks in every 10th step. `with overlap`: an average runs "
            "during the next forward and backward pass",
            training.waits,
            grids=(("speed-up over Full", "accuracy in %"),),
        ),
        Experiment(
            "wagma_sgd",
            "ablations",
            "Section 5.2: without one part or another",
            "digits on 8 ranks, of which two are late in each step; one group of all ranks also simulated, with 64 and 16",
            training.ablations,
            grids=(
                ("accuracy in %", "distance of replicas from their mean", "speed-up over Full"),
                (
                    "Piz Daint, recursive halving doubling",
                    "Piz Daint, recursive doubling",
                    "10 Gbit/s, recursive halving doubling",
                    "10 Gbit/s, recursive doubling",
                ),
            ),
        ),
        Experiment(
            "wagma_sgd",
            "fig6",
            "Figure 6: a Transformer's batches",
            "20,000 times drawn between the quartiles of the plot",
            throughput.sentence_times,
            grids=((*_TIMES, "slowest of 64 ranks over the mean"),),
        ),
        Experiment(
            "wagma_sgd",
            "fig7",
            "Figure 7: throughput of a Transformer",
            "simulated with 4 to 64 ranks, on two kinds of links, with the times of `fig6`",
            throughput.text,
            grids=(("16 ranks, Piz Daint", "64 ranks, Piz Daint", "16 ranks, 10 Gbit/s", "64 ranks, 10 Gbit/s"),),
        ),
        Experiment(
            "wagma_sgd",
            "fig8",
            "Figure 8: quality over time where sequences differ",
            "sequences on 8 ranks in place of a Transformer on WMT17; averages of all ranks every 10th step (paper: 8th)",
            training.text,
            grids=(("speed-up over Full", "accuracy in % (paper: BLEU, here: sequences)"),),
        ),
        Experiment(
            "wagma_sgd",
            "fig9",
            "Figure 9: collecting experience",
            "5,000 times drawn from the least one, the median and the greatest",
            throughput.collection_times,
            grids=((*_TIMES, "slowest of 1024 ranks over the mean"),),
        ),
        Experiment(
            "wagma_sgd",
            "fig10",
            "Figure 10: throughput of PPO",
            "simulated with 16 to 1,024 ranks, on two kinds of links, with the times of `fig9`",
            throughput.experience,
            grids=(("1,024 ranks, Piz Daint", "1,024 ranks, 10 Gbit/s"),),
        ),
    ),
    refusals=(
        Refusal("Figure 5: ResNet-50 on ImageNet", "neither the images nor 64 GPUs can be had", "digits, in `fig5`"),
        Refusal("Figure 8: BLEU of a Transformer on WMT17", "10 epochs take weeks on 2 cores", "sequences, in `fig8`"),
        Refusal(
            "Figure 11: SPL in Habitat",
            "Gibson and Matterport3D are given out on request only, and 64 GPUs cannot be had",
            "PPO on an environment with heavy-tailed episodes, `examples/torch/work/ppo.py`",
        ),
        Refusal("Accuracies without delays, twice as many steps, 130 epochs (section 5.2)", "as figure 5"),
    ),
)
