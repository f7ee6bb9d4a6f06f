"""Pickles one setting of the notebook, also where it is a function or an object of a class that only the notebook has.

The settings travel before what the cell uses, and beside it. By pickle, which takes a sixth of the time, unless that
would only name what the notebook defines.
"""

from __future__ import annotations

import pickle
from typing import Any

from nbspawn._payload import classes

_NOTEBOOK = b"__main__"
_BY_VALUE = b"cloudpickle"  # each stream of its names its module


def pack(obj: object) -> bytes:
    """Raises whatever a part of ``obj`` raises when it is pickled."""
    try:
        packed = pickle.dumps(obj)
    except Exception:  # a lambda, for one; cloudpickle knows what is wrong if it cannot either
        packed = _NOTEBOOK
    if _NOTEBOOK in packed:
        import cloudpickle

        packed = cloudpickle.dumps(obj)
    return packed


def load(packed: bytes) -> Any:
    """In the rank: load what ``pack`` has packed. A class of the notebook's is the one that comes with the cell's
    variables as well."""
    if _BY_VALUE not in packed:
        return pickle.loads(packed)
    with classes.new_classes_are_the_kernels({}):
        return pickle.loads(packed)
