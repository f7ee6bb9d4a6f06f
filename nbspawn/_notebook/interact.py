"""``nbspawn.interact``: a function on N ranks, as a widget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbspawn.errors import UsageError

if TYPE_CHECKING:
    from nbspawn._notebook.interact_widget import Interact


def interact(
    fn: Callable[..., Any],
    nprocs: int | str = "auto",
    start_method: str = "auto",
    backend: str | None = None,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Interact:
    """A widget that calls ``fn(rank, **arguments)`` in ``nprocs`` new ranks whenever *Run* is pressed::

        nbspawn.interact(train, nprocs=4, backend="gloo", lr=(1e-4, 1e-1), epochs=10)

    It has controls for the number of ranks, the start method, the backend and the function's own arguments, and shows
    the live table, the output, the displays and the error. The run is in the background: the kernel is free for other
    cells. When the cell that defines ``fn`` is run again, the next *Run* uses the new function. The widget is a
    ``VBox``: it can be a part of other layouts, and its ``result``, ``error`` and ``running`` can be observed.

    Args:
        fn: takes the rank first, as with torch's ``spawn``, then its own arguments.
        nprocs: the number of ranks; or 'gpu', 'xla', 'tpu' (one per device), 'cpu' (one per core), 'auto' (what fits).
        start_method: as for ``nbspawn.spawn``.
        backend: as for ``nbspawn.spawn``.
        options: further keyword arguments of ``nbspawn.spawn``, such as ``{"timeout": 60, "env": {"A": "1"}}``.
        **arguments: for each argument of ``fn`` a value, a widget, or an abbreviation as for ``ipywidgets.interact``:
            ``(min, max[, step])`` for a slider, a list or a dict for a choice, a number, a bool, a string.
            Arguments that are not given have their default. A float range that spans two powers of ten or more gets a
            logarithmic slider. (If ``fn`` has an argument with the name of one of those above, bind it with
            ``functools.partial``.)

    Returns:
        The widget.

    Raises:
        UsageError: an argument is invalid, or ipywidgets is not installed.
    """
    try:
        from nbspawn._notebook.interact_widget import Interact
    except ModuleNotFoundError as missing:
        if missing.name != "ipywidgets":
            raise
        raise UsageError("interact() needs ipywidgets: `%pip install ipywidgets` installs it") from None
    return Interact(fn, nprocs, start_method, backend, options or {}, arguments)
