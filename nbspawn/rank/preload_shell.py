"""Imported by the private fork server of a notebook: IPython and one light shell, which every rank inherits."""

from nbspawn.rank import shell

shell.instance()
