"""The conda recipe requires what pyproject.toml requires, under conda's names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.extended

tomllib = pytest.importorskip("tomllib")  # since Python 3.11
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    return read


def test_it_requires_at_run_time_what_the_wheel_requires(recipe: dict[str, Any]) -> None:
    ours = {re.sub(r"^torch>", "pytorch>", needed) for needed in PROJECT["dependencies"]}
    python, *theirs = (needed.replace(" ", "") for needed in recipe["requirements"]["run"] if needed != "__unix")
    assert python == "python>=${{python_min}}" and set(theirs) == ours
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]


def test_it_is_built_with_the_same_build_system(recipe: dict[str, Any]) -> None:
    assert set(recipe["requirements"]["host"][1:]) == {"pip", *PYPROJECT["build-system"]["requires"]}


def test_it_says_the_same_of_the_package(recipe: dict[str, Any]) -> None:
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (PROJECT["description"], PROJECT["license"])
    assert about["repository"] == PROJECT["urls"]["Repository"]
