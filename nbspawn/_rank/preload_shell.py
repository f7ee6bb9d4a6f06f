"""Imported by the private fork server of a notebook: IPython and one light shell, which every rank inherits."""

import sys

from nbspawn._rank import shell

_shell = shell.instance()
shell.displays()
try:
    raise RuntimeError
except RuntimeError:
    # The first traceback in colour imports and sets up much: 0.2 s by which every failing rank would be late.
    _shell.InteractiveTB.structured_traceback(*sys.exc_info())
