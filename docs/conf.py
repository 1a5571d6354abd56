"""The documentation's settings: ``make docs`` builds it into ``docs/_build/html``."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

# Live blocks run programs on CPU devices.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["TERM"] = "dumb"  # help texts without colours

project = "TOAST"
author = "the authors of TOAST"
project_copyright = author
version = release = importlib.metadata.version("toast-partitioner")

extensions = ["myst_parser", "sphinx.ext.autodoc", "pages"]
exclude_patterns = ["_build", "_ext"]
# Pages that are written elsewhere may not be there yet; and no lexer knows all of clingo.
suppress_warnings = [
    "misc.highlighting_failure",
    "ref.python",  # a type ``bytes`` might be one of several fields of that name
]
myst_heading_anchors = 3
smartquotes = False  # options are --options

autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": True}
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = f"TOAST {release}"
html_static_path = ["_static"]
html_css_files = ["toast.css"]
html_copy_source = False
html_show_sphinx = False
templates_path: list[str] = []
