"""The directive ``command-line``: the options of a magic as a table, made from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nbspawn._notebook.arguments import PARSER, RANKS_PARSER
from nbspawn._notebook.verbs import VERBS


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        values = "|".join(map(str, action.choices)) if action.choices else action.metavar or ""
        names = ", ".join(action.option_strings)
        yield f"{names} {values}".strip() if action.nargs != 0 else names, (action.help or "").replace("%%", "%")


_TABLES = {
    "spawn": ("Option", lambda: _options(PARSER)),
    "ranks": ("Option", lambda: _options(RANKS_PARSER)),
    "commands": ("Command", lambda: ((f"%ranks {verb.usage}", verb.meaning.replace("`", "")) for verb in VERBS)),
}


class CommandLine(SphinxDirective):
    """``{command-line} spawn``, ``ranks`` or ``commands``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        heading, rows = _TABLES[self.arguments[0]]
        group = nodes.tgroup(cols=2)
        group += [nodes.colspec(colwidth=35), nodes.colspec(colwidth=65)]
        head, body = nodes.thead(), nodes.tbody()
        head += _row(nodes.Text(heading), nodes.Text("Meaning"))
        for shown, meaning in rows():
            body += _row(nodes.literal(text=shown), nodes.Text(meaning))
        group += [head, body]
        table = nodes.table()
        table += group
        return [table]


def _row(*cells: nodes.Node) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += nodes.paragraph("", "", cell)
        row += entry
    return row


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
