"""The wording that the table of a run and the errors share: ranks, exit codes, signals. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

_LIKELY = {
    "SIGKILL": " (the system does this when memory runs out: look at `dmesg`, or use fewer or smaller ranks)",
    "SIGSEGV": " (a crash in native code)",
    "SIGBUS": " (often a full /dev/shm)",
}


def name_ranks(ranks: Iterable[int]) -> str:
    """'Rank 3', 'Ranks 0 and 3', 'Ranks 0-6 and 9', '32 ranks (0, 2, 4, 6, …)'."""
    ranks = list(ranks)
    parts = ranges(ranks).split(",")
    if len(parts) > 6:
        return f"{len(ranks)} ranks ({', '.join(parts[:4])}, …)"
    return f"Rank {listed(parts)}" if len(ranks) == 1 else f"Ranks {listed(parts)}"


def listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]


def ranges(ranks: Iterable[int]) -> str:
    """Rank numbers, short: ``ranges([3, 0, 2])`` is ``"0,2-3"``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def few_ranges(ranks: Iterable[int], width: int) -> str:
    """The ranks as ``ranges`` writes them, in at most ``width`` columns: if necessary the first ones and how many they
    are: '8,10,… (24)'."""
    ranks = sorted(ranks)
    whole = ranges(ranks)
    if len(whole) <= width:
        return whole
    many = f",… ({len(ranks)})"
    fits = whole.rfind(",", 0, width - len(many) + 1)
    return (whole[:fits] if fits > 0 else str(ranks[0])) + many


def on_host(hosts: Iterable[str]) -> str:
    """' (host2)', if these are the names of one of several machines; '' for several, and where there is one."""
    names = set(hosts)
    name = names.pop() if len(names) == 1 else ""
    return f" ({name})" if name else ""


def exit_code(code: int | None) -> str:
    """'exit code 7', 'SIGSEGV', or, since not every real-time signal has a name, 'signal 50'."""
    if code is None:
        return "ended, exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    return _known_signal(code) or f"signal {-code}"


def stopped(code: int | None, how: str, why: str) -> str:
    """How a rank ended that was asked to by the signal ``how``: 'SIGTERM by nbspawn (stop)'."""
    if code in (-signal.SIGTERM, -signal.SIGKILL):
        return f"{exit_code(code)} by nbspawn ({why})"
    return f"{'ended' if code is None else exit_code(code)} after {how} by nbspawn ({why})"


def signal_name(exitcode: int) -> str:
    """'SIGSEGV' for -11; for a signal without a name, torch's '<Unknown signal 50>'."""
    return _known_signal(exitcode) or f"<Unknown signal {-exitcode}>"


def process_end(rank: int, exitcode: int, text: str = "") -> str:
    """torch's wording for a process that ended without raising, and what is likely behind it; ``text`` is what the
    rank gave to ``sys.exit``, or a library said before it aborted."""
    if exitcode < 0:
        name = signal_name(exitcode)
        return f"process {rank} terminated with signal {name}" + (f": {text}" if text else _LIKELY.get(name, ""))
    if exitcode == 0:
        return f"process {rank} terminated with exit code 0 before it had finished (os._exit, or its main thread died)"
    return f"process {rank} terminated with exit code {exitcode}" + (f": {text}" if text else "")


def headline(message: str) -> str:
    """The first line of an exception's text, with the next one where the sentence goes on there; of an error that torch
    has carried over from another process (a DataLoader's worker) also what it was."""
    lines = message.strip().splitlines() or [""]
    first = lines[0].rstrip()
    if lines[1:] and (lines[0].endswith(" ") or first.endswith((":", ","))):
        first = f"{first} {lines[1].strip()}"
    return f"{first.rstrip('.')}: {lines[-1].strip()}" if "\nOriginal Traceback" in message else first


def _known_signal(exitcode: int) -> str:
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return ""
