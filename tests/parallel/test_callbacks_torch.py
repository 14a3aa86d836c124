"""The callbacks, saved models and local layers of `test_callbacks`, on Keras's backend PyTorch."""

from harness.matrix import keras_on_torch
from test_callbacks import *

pytestmark = keras_on_torch
