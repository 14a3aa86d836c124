"""Sphinx configuration."""

import horovod_partial.keras as keras_front
import horovod_partial.tensorflow as tensorflow_front
import horovod_partial.torch as torch_front
from horovod_partial.keras import optimizer as keras_optimizer
from horovod_partial.tensorflow import tape
from horovod_partial.torch import wrapping

project = "horovod-partial"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_show_copyright = False  # no file of the project names an owner
myst_heading_anchors = 4
exclude_patterns = ["versions.md"]  # a part of install.md

# The reference is made from the docstrings, in which `text` is code.
default_role = "code"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the text says it, with units and ranges
napoleon_use_ivar = True
napoleon_use_rtype = False
maximum_signature_line_length = 100

# Users get these from functions, as methods of a subclass of their own class; the reference has them under the functions' names.
for wrap, methods in (
    (torch_front.DistributedOptimizer, wrapping.Methods),
    (tensorflow_front.DistributedGradientTape, tape._Methods),
    (keras_front.DistributedOptimizer, keras_optimizer._Methods),
):
    for name, method in vars(methods).items():
        if not name.startswith("_"):
            setattr(wrap, name, method)
