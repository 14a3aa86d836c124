"""The callbacks, saved models and local layers of `test_callbacks`, on Keras's backend PyTorch."""

import pytest
from test_callbacks import *

pytestmark = pytest.mark.launch(environment={"KERAS_BACKEND": "torch"}, label="torch", framework="torch")
