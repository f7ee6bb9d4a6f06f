"""The signals by which the kernel requests something of a rank, other than its end.

Real-time signals do not collide with a program's own use of SIGUSR1 or SIGUSR2. macOS has none.
"""

from __future__ import annotations

import signal

STACK = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Write the main thread's stack (_rank/report/stacks.py)."""

BREAK = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""Stop in the debugger (_rank/debug/debugger.py)."""
