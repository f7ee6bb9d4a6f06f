"""What a display holds, as plain data that any process can load."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any


def json_ready(data: Any) -> Any:
    """The data as on Jupyter's wire: plain, binary images as base64. Raises TypeError for what is none of that: it
    would be an object of somebody's class, which the kernel would have to load; ipykernel refuses it as well."""
    if data is None or type(data) in (str, int, float, bool):
        return data
    if isinstance(data, (bytes, bytearray, memoryview)):
        return base64.b64encode(data).decode("ascii")
    if isinstance(data, Mapping):
        return {str.__str__(str(key)): json_ready(value) for key, value in data.items()}
    if isinstance(data, str):
        return str.__str__(data)
    if isinstance(data, datetime.datetime):
        return data.isoformat()
    if isinstance(data, Integral):
        return int(data)
    if isinstance(data, Real):
        return float(data)
    if isinstance(data, Iterable):
        return [json_ready(value) for value in data]
    raise TypeError(f"a display cannot hold a {type(data).__name__}: give it text, numbers, lists and dicts")
