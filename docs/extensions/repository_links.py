"""Links from pages to files outside ``docs/``: to a notebook's page, or to the file in the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

_LINK = re.compile(r"\[([^][]*)\]\(((?:\.\./)+|docs/)([^()\s#]+)(#[^()\s]*)?\)")


def _rewrite(app: Sphinx, docname: str, content: list[str]) -> None:
    docs = Path(app.srcdir)
    root = docs.parent
    here = Path(app.env.doc2path(docname)).resolve().parent  # docs/notebooks is a link

    def target(found: re.Match[str]) -> str:
        text, anchor = found[1], found[4] or ""
        path = Path(os.path.normpath(here / found[2] / found[3]))
        if path.is_relative_to(docs):
            return f"[{text}](/{path.relative_to(docs)}{anchor})"
        if path.suffix == ".ipynb":
            return f"{{doc}}`{text} </{path.relative_to(root).with_suffix('')}>`"
        kind = "tree" if path.is_dir() else "blob"
        return f"[{text}]({app.config.repository}/{kind}/main/{path.relative_to(root)}{anchor})"

    content[0] = _LINK.sub(target, content[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_config_value("repository", "", "env")
    app.connect("source-read", _rewrite)
    return {"parallel_read_safe": True}
