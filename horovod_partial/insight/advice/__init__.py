"""Predicts which policy would make a recorded job fastest, by running its compute times through the simulator."""

from horovod_partial.insight.advice.predictions import PASSES, Prediction, gradient_policies, predict
from horovod_partial.insight.advice.recommendation import LEAST_QUORUM, Advice, advise

__all__ = ["LEAST_QUORUM", "PASSES", "Advice", "Prediction", "advise", "gradient_policies", "predict"]
