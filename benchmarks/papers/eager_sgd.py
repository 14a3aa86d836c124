"""eager-SGD: its experiments, and what of it is here.

.venv/bin/python benchmarks/papers eager_sgd fig9
"""

from __future__ import annotations

import eager_sgd_latency as latency
import eager_sgd_throughput as throughput
import eager_sgd_times as times
import eager_sgd_training as training
from experiment import Experiment, Paper, Refusal

_TIMES = ("mean", "standard deviation", "least", "greatest", "slowest of 8 ranks over the mean")  # columns

PAPER = Paper(
    key="eager_sgd",
    name="eager-SGD",
    idea="allreduces of gradients that do not wait for late ranks: [`Solo`, `Majority` and `Quorum`](policies.md)",
    citation=(
        "Shigang Li, Tal Ben-Nun, Salvatore Di Girolamo, Dan Alistarh, Torsten Hoefler: *Taming Unbalanced Training "
        "Workloads in Deep Learning with Partial Collective Operations*, PPoPP 2020 "
        "([doi:10.1145/3332466.3374528](https://doi.org/10.1145/3332466.3374528))"
    ),
    implemented=(
        ("Solo collectives (section 4.1)", "`hvd.Solo()`"),
        (
            "Majority collectives (section 4.2)",
            '`hvd.Majority(initiator="random")`; with the guarantee `hvd.Majority()`',
        ),
        ("Other quorums, which section 9 leaves open", "`hvd.Quorum(...)`"),
        (
            "Rounds that go on without a rank, in a thread of their own (sections 4.1.1, 4.3)",
            "Horovod's background thread, [the protocol](../protocol.md), `cpp/core`",
        ),
        (
            "Algorithm 2: late gradients are added to the next, sums are divided by P (section 5)",
            "`hvd.DistributedOptimizer(sync=...)`, [policies](../policies.md)",
        ),
        (
            "Overwritten results, and models synchronised every few epochs (sections 4.1.1, 5)",
            '`missed="latest"`, and `benchmarks/baselines/eager_sgd.py`, which averages the models',
        ),
        ("The bound on staleness that section 6 assumes", "`max_staleness`"),
    ),
    differs=(
        "A coordinator decides who is in a round, within Horovod's negotiation; the paper's ranks send activations "
        + "along a recursive doubling. So a round costs a cycle of Horovod more, and all ranks know who was in it.",
        "`Majority()` has half of the ranks in every round; the paper's random initiator has half on average, and is "
        + "an option.",
        "Results that a rank has missed are kept, and each is applied in a step of its own, so all ranks have one "
        + "model. The paper's rank sees the newest only.",
        "Where models are synchronised, they are averaged. The paper does not say how; its released code copies rank "
        + "0's.",
        "The accuracy of eager-SGD as published is the mean over the ranks' own models at the end. An average of models that "
        + "have parted can be worse.",
        "Late gradients are added up, as in section 5. The released code writes the newer over the older.",
        "Staleness is bounded in every job. The paper assumes a bound; its code has one for solo: every 33rd "
        + "execution is a full one.",
        "A rank takes all of its steps and serves all of its delays. In Fig. 12 the paper's solo takes less time for "
        + "a step than the mean delay alone, so its ranks cannot have.",
        "Ranks that end, fail or wait elsewhere are not treated in the paper; here rounds go on without them.",
        "All policies and rivals of an experiment use the same learning rate. It was not tuned for each.",
    ),
    experiments=(
        Experiment(
            "eager_sgd",
            "fig2",
            "Figure 2: videos of UCF101, and an LSTM's batches of them",
            "9,537 lengths drawn from the published statistics, in batches of 16 of similar length",
            times.lengths,
            grids=(_TIMES,),
        ),
        Experiment(
            "eager_sgd",
            "fig3",
            "Figure 3: a Transformer's batches",
            "20,653 times drawn from the published statistics",
            times.language,
            grids=((*_TIMES, "slowest of 64 ranks over the mean"),),
        ),
        Experiment(
            "eager_sgd",
            "fig4",
            "Figure 4: ResNet-50's batches in a cloud",
            "25,022 times drawn from the published statistics",
            times.cloud,
            grids=((*_TIMES, "slowest of 64 ranks over the mean"),),
        ),
        Experiment(
            "eager_sgd",
            "fig9",
            "Figure 9: latency of an allreduce under skew",
            "64 B to 4 MiB; measured with 8 ranks 5 ms apart, simulated with 32 ranks 1 ms apart",
            latency.run,
            grids=(
                ("ms for 64 B", "ms for 4,194,304 B", "Full's latency over that of"),
                ("active ranks of 8, mean", "active ranks, deviation"),
            ),
        ),
        Experiment(
            "eager_sgd",
            "fig10",
            "Figure 10: regression on a hyperplane",
            "8 ranks, 8,192 dimensions; a tenth of the paper's times: 40 ms, of which sleeps are the most, and one "
            "random rank late by 20, 30 or 40 ms",
            throughput.hyperplane,
            grids=(("late by 20 ms", "late by 30 ms", "late by 40 ms"),),
        ),
        Experiment(
            "eager_sgd",
            "fig11",
            "Figure 11: ResNet-50 where four ranks of 64 are late",
            "simulated with 64 ranks, on two kinds of links; accuracy: digits on 8 ranks, one of which is late in "
            "each step",
            throughput.imagenet,
            grids=(
                (
                    "Piz Daint, late by 300 ms",
                    "Piz Daint, late by 460 ms",
                    "10 Gbit/s, late by 300 ms",
                    "10 Gbit/s, late by 460 ms",
                ),
                ("accuracy in % (paper: top-1, here: digits)",),
            ),
        ),
        Experiment(
            "eager_sgd",
            "table2",
            "Table 2: a parameter server and gossip",
            "simulated with 64 ranks, on two kinds of links; measured with 8 ranks, one of which is late in each step",
            throughput.peers,
            grids=(("64 ranks, Piz Daint", "64 ranks, 10 Gbit/s"), ("8 ranks, one late: throughput over Full's",)),
        ),
        Experiment(
            "eager_sgd",
            "fig12",
            "Figure 12: all ranks late, in turn",
            "digits on 8 ranks in place of ResNet-32 on CIFAR-10; a tenth of the paper's times: 20 ms, and delays of "
            "5 to 40 ms",
            training.severe,
            grids=(("speed-up over Full", "accuracy in %"),),
        ),
        Experiment(
            "eager_sgd",
            "fig13",
            "Figure 13: sequences of natural lengths",
            "sequences of the lengths of UCF101's videos on 8 ranks, with a small network in place of an LSTM; sleeps "
            "of 25 ms in the mean; 5 epochs in place of 50, so that the models of eager-SGD as published, which every "
            "10th epoch averages, are averaged never",
            training.videos,
            grids=(("speed-up over Full", "accuracy in %"),),
        ),
    ),
    refusals=(
        Refusal(
            "Figures 11b and 11c, table 1: ResNet-50 on ImageNet",
            "neither the images nor 64 GPUs can be had",
            "digits, in `fig11`",
        ),
        Refusal("Figure 12: ResNet-32 on CIFAR-10", "190 epochs take days on 2 cores", "digits, in `fig12`"),
        Refusal(
            "Figure 13: LSTM on UCF101",
            "neither the videos nor their features can be had",
            "sequences of the same lengths",
        ),
        Refusal("Top-5 accuracies", "tasks of 10 and 16 classes, where they tell nothing"),
        Refusal(
            "Weak and strong scaling over one node (section 7)",
            "there is one machine, of 2 cores",
            "Full on as many ranks",
        ),
    ),
)
