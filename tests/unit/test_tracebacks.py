"""A rank's traceback gets the names and the lines of the notebook's cells."""

from __future__ import annotations

from nbspawn._protocol.frames import Frame
from nbspawn._render.tracebacks import in_cells

TRACEBACK = """Traceback (most recent call last):
  File "/tmp/ipykernel_7/1.py", line 9, in train
  File "/home/me/lib.py", line 3, in work
    return 1 / 0
           ~~^~~
  File "/tmp/ipykernel_7/2.py", line 1
  File "<string>", line 1, in <module>
ZeroDivisionError: division by zero
  File "no frame"
"""


def source(frame: Frame) -> str:
    return f"{frame.name} {frame.line}" if "ipykernel" in frame.file else ""


def test_cells_have_their_names_and_lines() -> None:
    names = {"/tmp/ipykernel_7/1.py": "Cell In[5]"}
    assert in_cells(TRACEBACK, names, source) == (
        "Traceback (most recent call last):",
        "  Cell In[5], line 9, in train",
        "    train 9",
        '  File "/home/me/lib.py", line 3, in work',
        "    return 1 / 0",
        "           ~~^~~",
        '  File "/tmp/ipykernel_7/2.py", line 1',
        "    <module> 1",
        '  File "<string>", line 1, in <module>',
        "ZeroDivisionError: division by zero",
        '  File "no frame"',
    )


def test_an_empty_one() -> None:
    assert in_cells("", {}, source) == ()
