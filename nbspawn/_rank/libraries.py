"""What libraries have concluded about their process, and must conclude anew in a rank.

Imports none of them: a library that is not there has concluded nothing.
"""

from __future__ import annotations

import os
import sys

from nbspawn._payload import accelerate_state

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def forget_process_state() -> None:
    """Early in a rank, when it has its environment."""
    accelerate_state.forget()
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    if rank_zero is not None and hasattr(rank_zero.rank_zero_only, "rank"):
        rank_zero.rank_zero_only.rank = int(os.environ["RANK"])  # read at import, when there was none


def not_interactive() -> None:
    """In a forked rank, for what the notebook has imported. Lightning looks at its import whether it is in a notebook,
    and there refuses every strategy but those that fork. Many of its modules have that constant."""
    if not any(name in sys.modules for name in _LIGHTNING):
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LIGHTNING and "_IS_INTERACTIVE" in vars(module):
            module._IS_INTERACTIVE = False  # type: ignore[attr-defined]
