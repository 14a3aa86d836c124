"""The tests of `test_one_model_keras`, on Keras's backend PyTorch."""

import pytest
from harness.matrix import keras_on_torch
from test_one_model_keras import *

pytestmark = [keras_on_torch, pytest.mark.one_in(2)]
