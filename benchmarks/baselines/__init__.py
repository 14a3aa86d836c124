"""Published rivals, each with Horovod's collectives and ours: what one waits for is in its docstring."""

from baselines.ad_psgd import ADPSGD
from baselines.baseline import Baseline
from baselines.d_psgd import DPSGD
from baselines.eager_sgd import EagerSGD, ModelSync
from baselines.local_sgd import LocalSGD
from baselines.push_sum import PushSum

__all__ = ["ADPSGD", "DPSGD", "Baseline", "EagerSGD", "LocalSGD", "ModelSync", "PushSum"]
