"""One run on this machine: its ranks are watched, asked, and ended."""
