"""Programs as users paste them into notebooks say under ``%%spawn``, to the last digit, what they say under torchrun.

Each file beside this one is a script for torchrun. ``# %%`` parts it into cells: all of it is one cell of ``%%spawn``,
in ranks of the fork server; or the first cell is, and the others follow in forked ranks that were kept. A cell
``# %% in the notebook`` runs in the kernel. What is compared are the lines with the word "rank" and its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
import torchrun
from kernels import Kernel, Reply, ok
from torchrun import FOLDER, PROGRAMS, RANKS, Lines, said

ONCE_A_PROCESS = {"rpc_calls"}
"""What torch cannot do again in a process under torchrun either: RRefs use the first agent, which has shut down."""

BARS = {"rich_progress": ("100%",), "tqdm_notebook": ("5/5", "7/7")}
"""What is seen of each rank's bars when they have come to their end."""

QUICK = {"ddp", "digits", "fsdp2", "logging_setup", "rich_progress"}
"""Not extended: what they import beside torch is imported soon."""

SECONDS = 120.0
"""The bound of a cell that imports transformers or Lightning, on a busy machine."""


def cells(program: str) -> tuple[list[str], list[str]]:
    """The notebook's and the ranks'."""
    first, *more = re.split(r"(?m)^# %%(.*)\n", (FOLDER / f"{program}.py").read_text())
    headed = [*zip(["", *more[::2]], [first, *more[1::2]], strict=True)]
    of_notebook = [text for heading, text in headed if "in the notebook" in heading]
    return of_notebook, [text for _, text in headed if text.strip() and text not in of_notebook]


def said_in(*replies: Reply) -> Lines:
    return [said([line for reply in replies for line in ok(reply).of(rank)]) for rank in range(RANKS)]


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.extended) for name in PROGRAMS],
)
def program(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def launcher() -> Iterator[Popen[str]]:
    with torchrun.launcher() as started:
        yield started


@pytest.fixture(scope="module")
def under_torchrun(program: str, launcher: Popen[str]) -> Lines:
    return torchrun.prints(launcher, program)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that has imported nothing of what the programs use; ranks do that, and its fork server learns it."""
    yield from started(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that has imported all of it, as notebooks do at their top."""
    lines = (line for program in PROGRAMS for line in (FOLDER / f"{program}.py").read_text().splitlines())
    yield from started(
        tmp_path_factory.mktemp("imported"), *sorted({line for line in lines if line.startswith(("import ", "from "))})
    )


def started(folder: Path, *lines: str) -> Iterator[Kernel]:
    # Preloading is switched off in other tests (conftest.py); here it works as it does for users.
    with Kernel(folder, NBSPAWN_PRELOAD_MB="1024", XDG_CACHE_HOME=str(folder)) as kernel:
        ok(kernel.execute("\n".join(["%load_ext nbspawn", *lines]), SECONDS))
        yield kernel


def shown(reply: Reply) -> str:
    """All that the cell's place holds, as text."""
    displayed = [output["data"].get("text/plain", "") for output in reply.outputs if "data" in output]
    return "\n".join([reply.text(), *displayed])


def begin(kernel: Kernel, program: str, folder: Path) -> list[str]:
    """Go to a folder of the test's own, run the notebook's cells; returns those for ranks."""
    ok(kernel.execute(f"%cd -q {folder}"))
    of_notebook, of_ranks = cells(program)
    for text in of_notebook:
        ok(kernel.execute(text))
    return of_ranks


def test_in_one_cell(program: str, under_torchrun: Lines, bare: Kernel, tmp_path: Path) -> None:
    text = "\n".join(begin(bare, program, tmp_path))
    reply = bare.execute(f"%%spawn {RANKS}\n{text}", SECONDS)
    assert said_in(reply) == under_torchrun
    for end in BARS.get(program, ()):
        assert shown(reply).count(end) == RANKS, shown(reply)


@pytest.mark.extended
def test_ranks_differ_and_learn(launcher: Popen[str]) -> None:
    """The comparison is worth something: the forked launcher is torchrun; losses differ by rank and step, and fall."""
    printed = torchrun.run("digits")
    assert printed == torchrun.prints(launcher, "digits")
    steps = [line.split() for lines in printed for line in lines if " step " in line]
    assert len({words[5] for words in steps}) == len(steps) == 12
    mean = {int(words[3]): float(words[-1]) for words in steps}
    assert mean[5] < mean[0]


@pytest.mark.extended
def test_in_kept_ranks(program: str, under_torchrun: Lines, imported: Kernel, tmp_path: Path) -> None:
    """Cell by cell, and then the whole program once more in the same ranks."""
    first, *more = begin(imported, program, tmp_path)
    try:
        replies = [imported.execute(f"%%spawn {RANKS} -m fork --keep\n{first}", SECONDS)]
        replies += [imported.execute(f"%%ranks\n{text}") for text in more if replies[-1].status == "ok"]
        assert said_in(*replies) == under_torchrun
        if program not in ONCE_A_PROCESS:
            text = "\n".join([first, *more])
            assert said_in(imported.execute(f"%%ranks\n{text}")) == under_torchrun
    finally:
        imported.execute("%ranks stop")
