"""A run's state and its ranks' logs, drawn: pure functions and small machines, from bytes and state to text.

``lines`` makes lines of one rank's log, ``stream`` merges the lines of all ranks, ``text`` and ``html`` draw the
table. Nothing here reads a clock, a file or a front end.
"""
