"""A number's course over a whole run, in a few points: of constant size, however long the run lasts."""

from __future__ import annotations

POINTS = 8
"""At most."""


def extended(points: tuple[int, ...], count: int, value: int) -> tuple[int, ...]:
    """The course of ``count`` values, with one more. When all points are taken, each two become one, their maximum, and
    from then on a point stands for twice as many values."""
    spacing = 1 << (count // POINTS).bit_length()
    if count % spacing:
        return points if value <= points[-1] else (*points[:-1], value)
    if len(points) == POINTS:
        points = tuple(map(max, points[::2], points[1::2]))
    return (*points, value)
