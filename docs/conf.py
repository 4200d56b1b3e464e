"""The site of ``make docs``: Markdown pages and the API reference, readable without a network."""

from __future__ import annotations

import fxmem

project = "fxmem"
copyright = "fxmem contributors"
release = fxmem.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["conf.py"]
myst_heading_anchors = 3

html_theme = "alabaster"
html_theme_options = {"description": fxmem.__doc__, "fixed_sidebar": True, "page_width": "1100px"}
html_sidebars = {"**": ["about.html", "navigation.html", "searchfield.html"]}
html_copy_source = False

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
html_show_sphinx = False
