"""Which policy would make a recorded job fastest: its compute times, run through the simulator under each."""

from horovod_partial.advice.predictions import Prediction, gradient_policies, predict
from horovod_partial.advice.recommendation import Advice, advise

__all__ = ["Advice", "Prediction", "advise", "gradient_policies", "predict"]
