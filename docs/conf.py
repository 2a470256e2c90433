"""Sphinx configuration of the documentation website. Build it with `make docs`.

Sphinx reads the same Markdown files as GitHub, with the same links. Warnings are errors.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "aligner"
copyright = ""
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "aligner"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
# The website loads nothing from other hosts; the search runs as a script in the browser.
html_use_opensearch = ""
# Create the same heading anchors as GitHub, because pages link to them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Code blocks without a language contain commands and their output.
highlight_language = "none"
autodoc_member_order = "bysource"
default_role = "code"  # text between single backticks in docstrings
# Show types in signatures; put each argument of a long signature on its own line.
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90
