"""What the Markdown files promise: their links, the set-up commands, the table of options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbspawn._notebook.arguments import PARSER, RANKS_PARSER
from nbspawn._notebook.verbs import VERBS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("nbspawn/**/*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()

_LINK = re.compile(r"\]\(([^()\s]+)\)")


def _anchors(document: Path) -> set[str]:
    """As code hosts make them of headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(title: str) -> str:
    """The text below a heading, up to the next of its kind."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_exist(document: Path) -> None:
    for link in _LINK.findall(document.read_text()):
        if ":" in link:  # a web address
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (command,) = [line for line in README.splitlines() if line.endswith(".venv/bin/pytest")]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_pins_are_exact() -> None:
    for file in (*ROOT.glob("binder/*requirements.txt"), *ROOT.glob(".ci/*requirements.txt")):
        for line in file.read_text().splitlines():
            pin = re.fullmatch(r"[\w.-]+==[\w.]+(; python_version (<|>=) '[\d.]+')?", line)
            assert pin or not line or line.startswith("#"), line


def test_the_table_lists_every_option_and_no_other() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section("The cell magic"), re.MULTILINE)
    listed = {names: values for names, values in rows if names.startswith(("`-", "`NPROCS"))}
    expected = {
        ", ".join(f"`{name}`" for name in action.option_strings or [action.metavar]): action.choices or ()
        for action in PARSER._actions
    }
    assert listed.keys() == expected.keys()
    for names, choices in expected.items():
        assert set(choices) <= set(re.findall(r"`(\w+)`", listed[names])), names


def test_the_tables_of_ranks_list_every_option_and_word() -> None:
    text = section("Ranks that stay")
    listed = set(re.findall(r"`(--?[a-z][a-z-]*)`", "\n".join(re.findall(r"^\| (.*?) \|", text, re.MULTILINE))))
    shown = [
        action.option_strings
        for action in RANKS_PARSER._actions
        if action.option_strings and action.help != "==SUPPRESS=="
    ]
    assert all(listed & set(names) or "--help" in names for names in shown), shown
    assert listed <= {name for names in shown for name in names}
    assert {verb.name for verb in VERBS} == set(re.findall(r"`%ranks (\w+)", text)), "of %ranks"
