"""Imported by the importer for a notebook: IPython, and a minimal shell that every rank inherits."""

import sys

from nbspawn._rank import shell

_shell = shell.instance()
shell.displays()
try:
    raise RuntimeError
except RuntimeError:
    # The first coloured traceback takes 0.2 s for imports and initialisation, a delay in every failing rank.
    _shell.InteractiveTB.structured_traceback(*sys.exc_info())
