"""The reports of ranks as a table: aligned, bounded, what stands out is said; the same in text and in HTML."""

from __future__ import annotations

import re
from html import unescape

from nbspawn._accelerators.accelerator import Load
from nbspawn._protocol.memory import DeviceMemory, Held, Memory
from nbspawn._render import memory

MB = 1_000_000
NOTHING = Held("", 0, "")


def report(resident: int, *variables: Held, elsewhere: Held = NOTHING, others: int = 0, **more: object) -> Memory:
    """In MB."""
    tensors = sum(held.size for held in variables)
    made = Memory(
        resident * MB, 100 * MB, resident * MB, tensors, 0, variables, Held("", others * MB, ""), elsewhere, (), False
    )
    return made._replace(**more)  # type: ignore[arg-type]


def text(reports: dict[int, Memory], title: str = "Memory") -> str:
    return memory.report(title, reports, len(reports)).text


def html(reports: dict[int, Memory], title: str = "Memory") -> str:
    return memory.report(title, reports, len(reports)).html


MODEL = Held("model", 40 * MB, "8 tensors, largest .0.weight float32[1000, 1000]")
OPTIMIZER = Held("optimizer", 80 * MB, "12 tensors, largest .state[…]['exp_avg'] float32[1000, 1000]")
LEAK = Held("history", 1500 * MB, "1,204 tensors float32[1000, 312] in a list")
FOUR = {
    0: report(412, MODEL, OPTIMIZER),
    1: report(409, MODEL, OPTIMIZER),
    2: report(1912, MODEL, OPTIMIZER, LEAK),
    3: report(410, MODEL, OPTIMIZER, elsewhere=Held("", 900, "float32[225] in a list in class Cache")),
}


def test_the_text_of_four_ranks() -> None:
    assert memory.report("Memory of 4 ranks", FOUR, 5).text.splitlines() == [
        "Memory of 4 ranks",
        "rank                0       1       2       3",
        "process        412 MB  409 MB  1.9 GB  410 MB",
        " shared        100 MB  100 MB  100 MB  100 MB",
        " peak          412 MB  409 MB  1.9 GB  410 MB",
        "tensors        120 MB  120 MB  1.6 GB  120 MB",
        "history             -       -  1.5 GB       -",
        "optimizer       80 MB   80 MB   80 MB   80 MB",
        "model           40 MB   40 MB   40 MB   40 MB",
        "(no variable)       -       -       -   900 B",
        "Rank 2 has 1.5 GB in history, others have none.",
        "Rank 4: no answer; ended, stopped, or in native code that holds Python's lock.",
        "",
        "history: rank 2: 1,204 tensors float32[1000, 312] in a list",
        "optimizer: 12 tensors, largest .state[…]['exp_avg'] float32[1000, 1000]",
        "model: 8 tensors, largest .0.weight float32[1000, 1000]",
        "(no variable): rank 3: float32[225] in a list in class Cache",
    ]


def test_what_stands_out_is_bold() -> None:
    drawn = html(FOUR, "Memory of 4 ranks")
    assert re.findall(r"<b>(.*?)</b>", drawn) == ["Memory of 4 ranks", "1.9 GB", "1.9 GB", "1.6 GB", "1.5 GB"]
    assert "Rank 2 has 1.5 GB in history, others have none." in drawn


def test_two_ranks_and_small_differences() -> None:
    two = {0: report(400, Held("data", 95 * MB, "")), 1: report(400, Held("data", 100 * MB, ""))}
    assert "others" not in text(two)
    two[1] = report(600, Held("data", 300 * MB, ""))
    assert "Rank 1 has 300 MB in data, others have 95 MB." in text(two)
    small = {0: report(400, Held("data", 1 * MB, "")), 1: report(400, Held("data", 9 * MB, ""))}
    assert "<b>9" not in html(small)


def test_ranks_that_are_alike_share_a_column() -> None:
    many = {rank: report(400 + rank % 3, MODEL) for rank in range(64)}
    many[3] = report(2000, MODEL, LEAK)
    lines = text(many, "Memory of 64 ranks").splitlines()
    assert re.split(r"  +", lines[1]) == ["rank", "0-2,4-63", "3"]
    assert re.split(r"  +", lines[2]) == ["process", "401 MB", "2.0 GB"]
    for rank in range(10, 60, 5):
        many[rank] = report(400, Held(f"v{rank}", 100 * MB, ""))
    lines = text(many).splitlines()
    assert len(re.split(r"  +", lines[1])) <= 1 + 6 and max(map(len, lines)) <= 120
    assert "-100 MB" in "\n".join(lines), "ranks that are not alike share what is left"


def test_ranks_that_have_less_are_not_alike() -> None:
    many = {rank: report(400, *([MODEL] if rank != 5 else [])) for rank in range(8)}
    lines = text(many).splitlines()
    assert re.split(r"  +", lines[1]) == ["rank", "0-4,6-7", "5"] and "others have" not in "\n".join(lines)


def test_variables_are_bounded() -> None:
    variables = [Held(f"{'x' * 30}{number}", number * MB, "w" * 300) for number in range(100)]
    drawn = text({0: report(500, *variables, others=7)})
    lines = drawn.splitlines()
    assert len(lines) < 45 and max(map(len, lines)) <= 120
    assert f"others                {sum(range(88)) / 1000 + 0.007:.1f} GB" in drawn


def test_a_report_that_is_not_whole_says_so() -> None:
    drawn = text({0: report(500, MODEL), 1: report(500, MODEL, partial=True)})
    assert "Rank 1: not all objects were looked at, there are too many." in drawn


def test_devices() -> None:
    device = DeviceMemory("cuda:0", 300 * MB, 500 * MB, 200 * MB, "|==== summary <b> ====|")
    gpu = {rank: report(900, MODEL, devices=(device,), pinned=5 * MB) for rank in range(12)}
    drawn = text(gpu)
    assert [line.split() for line in drawn.splitlines()[5:9]] == [
        ["on", "GPU", "300", "MB"],
        ["cached", "200", "MB"],
        ["peak", "500", "MB"],
        ["tensors", "40", "MB"],
    ]
    whole = device._replace(load=Load(0, 90, 5_000 * MB, 16_000 * MB, 900 * MB))
    named = [line.split() for line in text({0: report(900, MODEL, devices=(whole,))}).splitlines()]
    assert ["in", "all", "900", "MB"] in named and ["whole", "GPU", "5.0", "GB"] in named
    assert drawn.count("|==== summary") == 1 and "torch's allocator, rank 0, cuda:0" in drawn
    assert html(gpu).count("|==== summary &lt;b&gt;") == 8


def cells(text: str) -> list[list[str]]:
    """Of each row, without tags."""
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", text)]
    return [[unescape(re.sub(r"<[^>]*>", "", cell)) for cell in row] for row in rows]


def test_html_is_the_same_table_and_safe() -> None:
    odd = Held("<script>", 20 * MB, "<img> & 'quoted'")
    drawn = html({0: report(500, odd), 1: report(500, odd)}, "<Memory>")
    assert not re.search("<script>|<img>|<Memory>", drawn)
    table = cells(drawn)
    assert {len(row) for row in table} == {4}
    assert table[0] == ["rank", "0", "1", ""] and table[-1] == ["<script>", "20 MB", "20 MB", "<img> & 'quoted'"]


def test_ranks_without_a_report() -> None:
    drawn = memory.report("Memory of 3 ranks", {}, 3)
    assert drawn.text.splitlines() == [
        "Memory of 3 ranks",
        "Ranks 0-2: no answer; ended, stopped, or in native code that holds Python's lock.",
    ]
    assert "<table" not in drawn.html
