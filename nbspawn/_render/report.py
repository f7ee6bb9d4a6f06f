"""Something that is shown once, below what the ranks have printed."""

from __future__ import annotations

from typing import NamedTuple


class Report(NamedTuple):
    """A report, as plain text and as HTML."""

    text: str
    html: str

    @property
    def data(self) -> dict[str, str]:
        """The report as a mime bundle."""
        return {"text/plain": self.text, "text/html": self.html}
