"""JupyterLab's own debugger, as a user has it: the bug button, the gutter, the call stack, the variables."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect


class Sidebar:
    """The debugger's, and the gutters of the notebook's cells."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def switch_on(self) -> None:
        """Click the bug."""
        self.open()
        self.page.locator(".jp-DebuggerBugButton").first.click()
        expect(self._gutter(0)).not_to_have_count(0)

    def open(self) -> None:
        """Show it."""
        self.page.evaluate("() => window.jupyterapp.shell.activateById('jp-debugger-sidebar')")

    def click(self, cell: int, line: int) -> None:
        """In the gutter, beside this line."""
        before = self.breakpoints.count()
        self._gutter(cell).nth(line).dispatch_event("mousedown")
        expect(self.breakpoints).not_to_have_count(before)

    def _gutter(self, cell: int) -> Locator:
        return (
            self.page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".cm-breakpoint-gutter .cm-gutterElement")
        )

    @property
    def breakpoints(self) -> Locator:
        return self.page.locator(".jp-DebuggerBreakpoint")

    @property
    def frames(self) -> Locator:
        return self.page.locator(".jp-DebuggerCallstackFrame")

    def frame(self, name: str) -> Locator:
        """The one of this name in the call stack."""
        return self.frames.filter(has_text=re.compile(f"^{re.escape(name)}"))

    def shows(self, *frames: str) -> None:
        """Wait until the call stack has these; the rank that has stopped first is on top."""
        for name in frames:
            expect(self.frame(name)).to_have_count(1)
        expect(self.frames).to_have_count(len(frames))

    def variable(self, name: str, value: str) -> None:
        """Wait until the variable is shown with a value that begins so."""
        found = self.page.locator(".jp-DebuggerVariables-body jp-tree-item").filter(has_text=re.compile(f"^{name}"))
        expect(found.first).to_have_text(re.compile(f"^{re.escape(name + value)}"))

    def has_gone_on(self) -> None:
        """Wait until nothing is shown as paused."""
        expect(self.frames).to_have_count(0)
        expect(self.page.locator(".jp-DebuggerPausedOverlay")).to_have_count(0)
        expect(self.page.locator('.jp-SidePanel jp-button[title*="Next"][aria-disabled="false"]')).to_have_count(0)

    def press(self, title: str) -> None:
        """A button above the call stack, or above the breakpoints, once it is enabled."""
        self.page.locator(f'.jp-SidePanel jp-button[title*="{title}"][aria-disabled="false"]').first.click()
