"""The site of these pages: `make docs`. Sphinx reads them as they are, with links as on GitHub; any
warning is an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "aligner"
copyright = ""
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "aligner"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
# Nothing comes from another host; the search is a script of the site's own.
html_use_opensearch = ""
# Pages link to headings as GitHub names them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Blocks without a language are commands and what they print.
highlight_language = "none"
autodoc_member_order = "bysource"
default_role = "code"  # what docstrings have between backticks
# Types stand in the signature, an argument a line where there are many.
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90
