"""P-Reduce (Miao et al., SIGMOD'21): averages with the ranks that are ready first. What is here of it, and its experiments."""

from __future__ import annotations

import p_reduce_measured as measured
import p_reduce_simulated as simulated
from experiment import Experiment, Paper, Refusal

PAPER = Paper(
    key="p_reduce",
    name="P-Reduce",
    idea="averages of models among the ranks that are ready first: [`PartialReduce`](models.md#partialreduce)",
    citation=(
        "X. Miao, X. Nie, Y. Shao, Z. Yang, J. Jiang, L. Ma, B. Cui: *Heterogeneity-Aware Distributed Machine Learning "
        "Training via Partial Reduce*, SIGMOD 2021. Its full text could not be had: what is here follows the abstract, "
        "Algorithm 2, the two examples of its matrices, and the authors' published demo."
    ),
    implemented=(
        (
            "Algorithm 2: a local step, then an average with the first P ranks that are ready",
            "`hvd.PartialReduce(size)`, `hvd.average`, [averages of models](../models.md#partialreduce)",
        ),
        ("The controller's queue, and groups that mix", "`cpp/core/groups/ready_groups.cc`"),
        ("No model passes through the controller", "it is Horovod's negotiation; groups reduce among themselves"),
        (
            "Constant and dynamic weights",
            '`hvd.PartialReduce(size, weights="staleness", alpha=0.9)`, `cpp/core/groups/weights.cc`',
        ),
        ("The final output: the mean of all models", "`optimizer.flush()`"),
        ("rho, the speed at which models mix", "`tests/cpp/test_ready_groups.cc`, and `rho` below"),
    ),
    differs=(
        "Groups of the paper begin whenever P ranks are ready. In one process set of Horovod's, groups that form while a "
        + "round runs wait for its end (`independent`).",
        "How the paper keeps cliques apart could not be had. Here the last groups, two for each rank by default, shall "
        + "connect all ranks, or else ranks of different parts are grouped first, and held for one step at most.",
        "Steps that no member of a group is at give their weight to the newest, as in the demo. The demo keeps 1 / P for a "
        + "rank's own model, so that its members end with different models; here all members have the same.",
        "The demo divides its rate by P, which the text that could be had does not ask for; begin with all-reduce's rate "
        + "(`rate`).",
        "Ranks begin from one model by `hvd.broadcast_parameters`; the demo's workers begin from different ones.",
        "Where fewer than P ranks are left at the end, those average; the demo waits for ever.",
    ),
    experiments=(
        Experiment(
            "p_reduce",
            "speedup",
            "Abstract: 1.21 to 2 times as fast",
            "8 ranks, a regression with steps of 40 ms (sleeps), one rank taking 1, 2 and 3 times as long",
            measured.speedup,
            grids=(("partial_reduce:3", "partial_reduce:4"),),
        ),
        Experiment(
            "p_reduce",
            "heterogeneity",
            "Abstract: kinds of heterogeneity",
            f"{simulated.RANKS} ranks simulated, steps of 1 s that vary by a quarter, an all-reduce of 0.1 s",
            simulated.heterogeneity,
            grids=(("groups of 2", "groups of 4", "groups of 8"),),
        ),
        Experiment(
            "p_reduce",
            "rho",
            "The examples of three workers: rho",
            "groups of the coordinator in simulated time",
            simulated.rho,
            grids=(("in groups of 2", "in groups of 3", "in groups of 4"),),
        ),
        Experiment(
            "p_reduce",
            "weights",
            "Constant against dynamic weights",
            "8 ranks, a regression with steps of 40 ms (sleeps), one rank taking 10 times as long, groups of 3",
            measured.weights,
        ),
        Experiment(
            "p_reduce",
            "isolation",
            "Abstract: update isolation",
            "4 ranks of the same speed in pairs, two of them half a step later, in simulated time",
            simulated.isolation,
        ),
        Experiment(
            "p_reduce",
            "independent",
            "Groups that wait for no other",
            f"{simulated.RANKS} ranks, log-normal steps: rounds of the coordinator against a model of independent groups",
            simulated.independence,
            grids=(("groups of 2", "groups of 3", "groups of 4", "groups of 8"),),
        ),
        Experiment(
            "p_reduce",
            "rate",
            "The demo's learning rate, divided by P",
            "8 ranks, digits, steps of 5 ms (sleeps), one rank taking 3 times as long, the demo's rate and momentum",
            measured.rate,
            grids=(("full", "partial_reduce:3", "partial_reduce:3, rate / 3"),),
        ),
    ),
    refusals=(
        Refusal(
            "The theorem, with its constants",
            "the text could not be had, only the abstract's claim of a rate as of distributed SGD",
            "`rho`",
        ),
        Refusal("How update isolation is prevented", "the rules could not be had, and no code has them", "`isolation`"),
        Refusal(
            "Speed-up of each model and data set, and the settings that gave 1.21 and 2",
            "figures could not be had; they need CIFAR-10, ImageNet, GPUs and a production cluster",
            "`speedup`, `heterogeneity`",
        ),
        Refusal(
            "Eager-Reduce, parameter servers and AD-PSGD as rivals",
            "their figures could not be had",
            "WAGMA-SGD's figure 4 has eager-SGD, AD-PSGD and others; a parameter server is simulated in eager-SGD's table 2",
        ),
        Refusal("Accuracy over time of deep networks", "CIFAR-10, ImageNet and GPUs are not here", "`rate`, on digits"),
    ),
)
