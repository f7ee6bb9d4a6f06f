"""What the page showed, and said to its kernel, is part of the report of a browser test that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lab import Lab


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    report = yield
    lab = item.funcargs.get("lab")
    if report.when == "call" and report.failed and isinstance(lab, Lab):
        report.sections.append(("the page", lab.page.locator("body").inner_text()))
        report.sections.append(("the last messages", "\n".join(lab.messages)))
    return report
