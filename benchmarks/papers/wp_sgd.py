"""WP-SGD (Cheng, Li and Zhang, JPDC 2020): averages weighted by work. What is here of it, and its experiments."""

from __future__ import annotations

import wp_sgd_measured as measured
import wp_sgd_nodes as nodes
from experiment import Experiment, Paper, Refusal

_STAND_IN = (
    f"generated rows, {nodes.DIMENSIONS:,} dimensions, 20 nodes of four speeds, lambda, eta, r and start as printed"
)

PAPER = Paper(
    key="wp_sgd",
    name="WP-SGD",
    idea="averages of models weighted by the work of each rank: [`WeightedAverage`](models.md#weightedaverage)",
    citation=(
        "D. Cheng, S. Li, Y. Zhang: *WP-SGD: Weighted parallel SGD for distributed unbalanced-workload training system*, "
        "Journal of Parallel and Distributed Computing 2020, "
        "[doi:10.1016/j.jpdc.2020.06.011](https://doi.org/10.1016/j.jpdc.2020.06.011)"
    ),
    implemented=(
        ("Weights (Algorithm 1, equation 6)", "`hvd.average`, `hvd.WeightedAverage`, `cpp/core/groups/weights.cc`"),
        (
            "The last average (Algorithm 1, line 14; Algorithm 5, line 17)",
            "`optimizer.flush()` under `WeightedAverage`",
        ),
        (
            "Averages after every s steps of the fastest (section 5.1)",
            "`hvd.WeightedAverage(period)`, `cpp/core/groups/weights.h`",
        ),
        (
            "Tests: is an average useful (equation 24), do periods converge (section 5.1)",
            "`horovod_partial.exchange.wp_sgd`, `optimizer.last_average`, `benchmarks/papers wp_sgd last_average`",
        ),
        ("r fitted to a run (section 4.2, figure 3)", "`horovod_partial.exchange.wp_sgd.estimate_contraction`"),
        (
            "Delay SGD within a node and D&M (Algorithms 3 and 5)",
            "`benchmarks/papers/wp_sgd_nodes.py`, in emulation only",
        ),
    ),
    differs=(
        "Delays are counted over each period; the paper counts them over the run, where the weight of a slow node goes to "
        + "zero. The figures below have both.",
        "Section 5.1 asks for sqrt(k) < sum r^T. Its factor for the mean needs r^s k < sum r^T too, which "
        + "`average_converges` tests as well.",
        "The printed r of 0.99999 is above the allowed 1 - lambda eta of 0.9999 for real-sim; figures 8 to 10 have both.",
        "In theorem 5 the average has k / sum r^T times the distance of the fastest node's mean from the solution, which is "
        + "1 or more: what it wins is variance. So while the loss still falls fast, one fast node alone is ahead of every "
        + "average of unequal work, here as in the theorem; in figures 6 to 9 it is not.",
        "Wall-clock figures count steps, whose times are modelled: a node takes as many a second under each method. What "
        + "two asynchronous workers gain over two OpenMP threads, of which the paper's D&M may live, is not in them.",
    ),
    experiments=(
        Experiment(
            "wp_sgd",
            "fig3",
            "Figure 3: r, fitted",
            f"one node on the stand-ins, {nodes.DIMENSIONS:,} dimensions",
            nodes.figure3,
            grids=(("KDD 2010", "real-sim"),),
        ),
        Experiment(
            "wp_sgd",
            "fig6",
            "Figure 6: KDD 2010 over time",
            _STAND_IN,
            nodes.figure6,
            grids=(("hinge loss over WP-SGD's when the fastest node has taken 300,000 steps",),),
        ),
        Experiment(
            "wp_sgd",
            "fig7",
            "Figure 7: KDD 2010 over iterations",
            _STAND_IN,
            nodes.figure7,
            grids=(("hinge loss after 300,000 steps of the fastest node",),),
        ),
        Experiment(
            "wp_sgd",
            "fig8",
            "Figure 8: real-sim over time",
            _STAND_IN,
            nodes.figure8,
            grids=(("hinge loss over WP-SGD's when the fastest node has taken 24,000 steps",),),
        ),
        Experiment(
            "wp_sgd",
            "fig9",
            "Figure 9: real-sim over iterations",
            _STAND_IN,
            nodes.figure9,
            grids=(("hinge loss after 24,000 steps of the fastest node",),),
        ),
        Experiment(
            "wp_sgd",
            "fig10",
            "Figure 10: real-sim late in the training, with more nodes",
            "as figure 9, with 40 nodes and with 10",
            nodes.figure10,
            grids=(("hinge loss after 48,000 steps, 10 nodes", "hinge loss after 48,000 steps, 40 nodes"),),
        ),
        Experiment(
            "wp_sgd",
            "ranks",
            "Figures 6 to 9 on real ranks",
            f"{measured.RANKS} ranks, real-sim's stand-in with a lambda of 0.01, steps of 2 ms (sleeps), one rank "
            f"{measured.SLOWER} times slower",
            measured.ranks,
            grids=(("sequential", "SimuParallel", "mini-batch", "WP-SGD", "direct average", "averages now and then"),),
        ),
        Experiment(
            "wp_sgd",
            "last_average",
            "Algorithm 1: the last average, weighted and plain",
            f"{measured.RANKS} ranks that take all, half and a quarter of the steps, each 2 ms (sleeps); digits and the SVM",
            measured.last_average,
            grids=(
                (
                    "seeds of 5 in which the weighted average is better",
                    "by how much its loss is smaller, %",
                    "than that of the fastest rank's model, %",
                ),
            ),
        ),
    ),
    refusals=(
        Refusal(
            "KDD Cup 2010 (algebra) and real-sim themselves",
            "the data sets are not here",
            "rows made with real-sim's dimensions, KDD's 20 to 40 non-zeros, and features that follow a power law",
        ),
        Refusal(
            "20,216,830 dimensions",
            "20 models of them take 3 GB, and a step of 20 nodes seconds",
            f"{nodes.DIMENSIONS:,} dimensions",
        ),
        Refusal(
            "Seconds of figures 6 and 8, table 1's cluster",
            "11 servers of four processors and two networks are not here",
            "steps of the fastest node; speeds from table 1 and section 6.2.1",
        ),
        Refusal(
            "Algorithm 4, the check of delayed updates",
            "as printed it subtracts a number from a vector, and refuses an update whenever the part of the model that is "
            "orthogonal to the row shrinks, which regularisation does in each step",
            "delayed updates are taken as they come; whether lemma 4's condition holds is in figures 7 and 9",
        ),
        Refusal("Figures 1, 2, 4 and 5", "drawings of the algorithms"),
        Refusal("Released code, and the experiments of 2017", "neither was found"),
    ),
)
