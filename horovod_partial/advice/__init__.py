"""Which policy would make a recorded job fastest: its compute times, run through the simulator under each."""

from horovod_partial.advice.predictions import Prediction, gradient_policies, predict
from horovod_partial.advice.recommendation import LEAST_QUORUM, Advice, advise

__all__ = ["LEAST_QUORUM", "Advice", "Prediction", "advise", "gradient_policies", "predict"]
