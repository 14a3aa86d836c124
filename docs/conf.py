"""Sphinx configuration."""

project = "horovod-partial"
extensions = ["myst_parser"]
html_theme = "furo"
myst_heading_anchors = 4
exclude_patterns = ["versions.md"]  # a part of install.md
