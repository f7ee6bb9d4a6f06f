"""The documentation site is built without a warning, and has what a reader looks for."""

from __future__ import annotations

import argparse
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nbspawn._notebook.arguments import PARSER, RANKS_PARSER
from nbspawn._notebook.verbs import VERBS

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]

pytest.importorskip("sphinx")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warning is an error: a link to a page or heading that does not exist is one."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", f"{folder}/doctrees"]
    built = subprocess.run([*command, ROOT / "docs", folder / "html"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


def words(page: Path) -> str:
    """What a reader sees of a page."""
    return html.unescape(re.sub(r"<[^>]*>", "", page.read_text()))


def test_the_reference_has_every_option_and_command(site: Path) -> None:
    text = words(site / "reference" / "magics.html")
    actions = [*PARSER._actions, *RANKS_PARSER._actions]
    options = {option for action in actions if action.help != argparse.SUPPRESS for option in action.option_strings}
    assert all(option in text for option in options) and "--auto " not in text
    assert all(f"%ranks {verb.usage}" in text for verb in VERBS)


def test_the_reference_has_what_the_package_exports(site: Path) -> None:
    import nbspawn

    text = words(site / "reference" / "api.html")
    assert all(name in text for name in nbspawn.__all__ if name != "__version__")


def test_every_notebook_is_shown_with_its_outputs(site: Path) -> None:
    for notebook in ROOT.glob("notebooks/*.ipynb"):
        assert (site / "notebooks" / f"{notebook.stem}.html").exists()
    assert "✓ done" in words(site / "notebooks" / "quickstart.html")


def test_no_page_needs_the_network_to_be_searched(site: Path) -> None:
    page = (site / "search.html").read_text()
    assert (site / "searchindex.js").stat().st_size > 10_000
    assert not re.findall(r"<script[^>]* src=\"https?:", page)
