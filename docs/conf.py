"""Sphinx's settings for the documentation site: ``sphinx-build -W docs build/site``."""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "extensions"))

_about = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
repository = _about["urls"]["Repository"]

project = _about["name"]
author = _about["authors"][0]["name"]
copyright = author
html_title = "nbspawn"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "command_lines", "repository_links"]
exclude_patterns = ["extensions"]
suppress_warnings = ["config.cache"]

# Pages are read on code hosts, too: their links are those of files, and their anchors those of headings.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "substitution"]
# The notebooks are shown as they were saved: some need a cluster, a TPU or a user's answers.
nb_execution_mode = "off"
nb_merge_streams = True

autodoc_typehints = "none"  # the signature has them, and the prose says what they mean
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}
html_copy_source = False
linkcheck_anchors = False
