"""The tests of `test_work_sharing_keras`, on Keras's backend PyTorch."""

import pytest
from harness.matrix import keras_on_torch
from test_work_sharing_keras import *

pytestmark = [keras_on_torch, pytest.mark.one_in(2)]
