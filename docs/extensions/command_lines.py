"""The directive ``command-line``: the options of a magic, made from its parser."""

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


_LISTS = {
    "spawn": lambda: _options(PARSER),
    "ranks": lambda: _options(RANKS_PARSER),
    "commands": lambda: ((f"%ranks {verb.usage}", verb.meaning.replace("`", "")) for verb in VERBS),
}


class CommandLine(SphinxDirective):
    """``{command-line} spawn``, ``ranks`` or ``commands``. A list rather than a table, which a phone cuts off."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        shown = nodes.definition_list()
        for usage, meaning in _LISTS[self.arguments[0]]():
            term = nodes.term("", "", nodes.literal(text=usage))
            definition = nodes.definition("", nodes.paragraph(text=meaning))
            shown += nodes.definition_list_item("", term, definition)
        return [shown]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
