"""What the Markdown files promise: their links, and the set-up commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()

_LINK = re.compile(r"(?:\]\(|<img src=\")([^()\s\"]+)[)\"]")


def _anchors(document: Path) -> set[str]:
    """As code hosts make them of headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
    (command,) = [line for line in README.splitlines() if line.endswith("&& .ci/tests")]
    for script in (".ci/run", ".github/workflows/ci.yml"):
        assert command in map(str.strip, (ROOT / script).read_text().splitlines()), script


def test_pins_are_exact() -> None:
    for file in (*ROOT.glob("binder/*requirements.txt"), *ROOT.glob(".ci/*requirements.txt")):
        for line in file.read_text().splitlines():
            pin = re.fullmatch(r"[\w.-]+==[\w.]+(; python_version (<|>=) '[\d.]+')?", line)
            assert pin or not line or line.startswith("#"), line
