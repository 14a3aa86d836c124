"""MG-WFBP (Shi, Chu and Li, IEEE TPDS 2021): merged gradients. What is here of it, and its experiments."""

from __future__ import annotations

from functools import partial

import mg_wfbp_measured as measured
import mg_wfbp_networks as networks
import mg_wfbp_simulated as simulated
from experiment import Experiment, Paper, Refusal

PAPER = Paper(
    key="mg_wfbp",
    name="MG-WFBP",
    idea="gradients merged into fewer messages by a plan: [`MergedGradients`](tuning.md#merged-gradients)",
    citation=(
        "Shaohuai Shi, Xiaowen Chu, Bo Li: *MG-WFBP: Merging Gradients Wisely for Efficient Communication in "
        "Distributed Deep Learning*, IEEE TPDS 2021 ([arXiv:1912.09268](https://arxiv.org/abs/1912.09268)), which extends "
        "INFOCOM 2019"
    ),
    implemented=(
        ("Algorithm 1 (section 4.2), the rule by which gradients are merged", '`hvd.MergedGradients("paper")`'),
        ("WFBP and SyncEASGD (sections 2.3, 2.4)", '`hvd.MergedGradients("wait_free")`, `("single")`'),
        (
            "The optimum of equation 24, exactly",
            '`hvd.MergedGradients("exact")`, one of the plans that the default tries; `cpp/core/merging/merging_plan.cc`',
        ),
        (
            "Algorithm 2: times of backward measured (section 5.1), one plan for all, one buffer for all (section 5.3)",
            "`horovod_partial/merging`, [merged gradients](../tuning.md#merged-gradients)",
        ),
        ("a + b M fitted to measured messages (sections 2.5, 6.2)", "`horovod_partial.merging.MessageCost.fit`"),
        (
            "Costs of reductions (table 2)",
            "`horovod_partial.insight.simulate.Cluster.cost`, [the simulator](../simulator.md)",
        ),
        ("Simulation of traces (section 6.4)", "`horovod_partial.insight.simulate`, `benchmarks/traces`"),
    ),
    differs=(
        "The paper's rule is not optimal, though lemma 1 and theorem 1 say so: a decision minimises the end of the next "
        + "message, not of the iteration (`theorem1`). `exact` is one of the plans that the default tries; `paper` is the rule as printed.",
        "Table 2 is taken as printed but for double binary trees: their start-up is printed as 2 log N, without alpha, "
        + "and taken as 2 alpha log N. Logarithms are whole steps.",
        "a and b are measured in every job, on the way that its gradients take, by a line that outliers do not move "
        + "(Theil and Sen), and refused where R² is below 0.95. The released code has them in a table, by the number of "
        + "workers.",
        "Plans are made again every 1,000 steps; the paper's is made once.",
        "Every policy that exchanges gradients has it, in PyTorch; the paper has full reductions. By default four plans are tried, and the fastest stays.",
        "What section 6.4 counts as merged-gradient layers is taken as messages: with one, all layers are merged.",
        "GoogLeNet: table 4 has 59 tensors and 13 million parameters. With auxiliary classifiers, which make the 13 "
        + "million, it has 64 weights, 59 of them of convolutions, and 5 biases: 69 tensors here.",
        "Times of tensors are PyTorch's on a CPU (GoogLeNet, ResNet-50) or in proportion to multiplications, scaled to "
        + "the compute that figures 8 to 10 show, with two thirds of it as backward. The paper's are a GPU's, and not "
        + "printed.",
        "The curves of figure 10 follow from a latency of 20 µs and, for WFBP, a message for each layer; the fit of figure 4 "
        + "means 32 µs, and table 4 counts tensors. Both are simulated.",
    ),
    experiments=(
        Experiment(
            "mg_wfbp",
            "theorem1",
            "Theorem 1: is the rule optimal?",
            "3,000 random models of 3 to 9 tensors, and one of three that can be followed by hand",
            simulated.theorem1,
        ),
        Experiment(
            "mg_wfbp",
            "fig4",
            "Figure 4: messages cost a + b M",
            f"Horovod's allreduce, 32 KiB to 4 MiB, 2 to 8 ranks on one machine, and 4 on links of {measured.MEGABITS} "
            "Mbit/s",
            measured.message_costs,
            grids=(
                (
                    "2 ranks, one machine",
                    "4 ranks, one machine",
                    "8 ranks, one machine",
                    f"4 ranks, links of {measured.MEGABITS} Mbit/s",
                ),
            ),
        ),
        Experiment(
            "mg_wfbp",
            "table4",
            "Table 4: the networks",
            "counted from the layers of each, for images of 224 x 224",
            networks.table4,
            grids=(("tensors", "parameters (M)", "MACs (G)"),),
        ),
        Experiment(
            "mg_wfbp",
            "fig5",
            "Figure 5: sizes of tensors",
            "counted from the layers of each network",
            networks.figure5,
            grids=(("ResNet-50", "ResNet-152", "DenseNet-161", "DenseNet-201", "Inception-v4"),),
        ),
        Experiment(
            "mg_wfbp",
            "fig6",
            "Figure 6: speed-up of GoogLeNet on the K80 cluster",
            "4 to 16 GPUs simulated, a ring, the paper's a and b; compute of 0.39 s as in figure 8",
            partial(simulated.speedup, "GoogLeNet"),
            grids=(("2 nodes", "4 nodes", "8 nodes"),),
        ),
        Experiment(
            "mg_wfbp",
            "fig7",
            "Figure 7: speed-up of ResNet-50 on the K80 cluster",
            "4 to 16 GPUs simulated, a ring, the paper's a and b; compute of 0.418 s as in figure 8",
            partial(simulated.speedup, "ResNet-50"),
            grids=(("2 nodes", "4 nodes", "8 nodes"),),
        ),
        Experiment(
            "mg_wfbp",
            "fig8",
            "Figure 8: communication that is not overlapped, on the K80 cluster",
            "as figures 6 and 7",
            simulated.figure8,
            grids=(("WFBP (s)", "SyncEASGD (s)", "MG-WFBP (s)", "exact plan (s)"),),
        ),
        Experiment(
            "mg_wfbp",
            "fig9",
            "Figure 9: four networks on the V100 clusters",
            "16 GPUs simulated, a ring, the paper's a and b; compute read off, tensors in proportion to multiplications",
            simulated.figure9,
            grids=(
                (
                    "FP32: MG-WFBP over WFBP",
                    "FP32: MG-WFBP over SyncEASGD",
                    "FP16: MG-WFBP over WFBP",
                    "FP16: MG-WFBP over SyncEASGD",
                ),
            ),
        ),
        Experiment(
            "mg_wfbp",
            "fig10",
            "Figure 10: a ring at 4 to 2,048 workers",
            "simulated with the start-up and compute that the figure itself shows, and with figure 4's a and b",
            simulated.figure10,
            grids=(tuple(f"{2**power} workers: messages" for power in range(2, 12)), ("GoogLeNet", "ResNet-50")),
        ),
        Experiment(
            "mg_wfbp",
            "fig11",
            "Figure 11: double binary trees at 128 to 2,048 workers, and table 2's other algorithms",
            "speed-ups, simulated with the start-up and compute that figures 10, 11 show, and with figure 4's a and b",
            simulated.figure11,
            grids=(("WFBP", "SyncEASGD", "MG-WFBP", "exact plan"),),
        ),
    ),
    refusals=(
        Refusal(
            "Figures 6 b and 7 b",
            "accuracy over 13 epochs of ImageNet, which is not here",
            "merging changes no value: tests/parallel/test_merging.py",
        ),
        Refusal(
            "TensorFlow in figures 6 and 7",
            "parameter servers of TensorFlow 1.3; neither they nor a model of them are here",
        ),
        Refusal(
            "Table 3, and times on GPUs", "its clusters of K80 and V100 are not here", "simulated, with its a and b"
        ),
        Refusal(
            "Sections 6.3 and 6.4 on real ranks",
            "steps under each plan are measured beside Horovod's own fusion",
            "[merged gradients](../benchmarks.md#merged-gradients)",
        ),
        Refusal("Section 4.3, parameter servers", "claimed there, and not evaluated; Horovod has none"),
    ),
)
