"""Finished progress bars of several ranks in one line, as tqdm, rich, Lightning and Keras draw them."""

from __future__ import annotations

import pytest

from nbspawn._render import bars

TQDM = "Epoch 1: 100%|██████████| 50/50 [00:{}<00:00, {}it/s, loss={}]"
RICH = "Working… \x1b[38;5;197m━━━━━━━━━━━━\x1b[0m \x1b[35m100%\x1b[0m \x1b[33m0:00:{}\x1b[0m"


@pytest.mark.parametrize(
    "lines, whole",
    [
        (
            [TQDM.format("03", " 9.21", -0.5), TQDM.format("04", "16.20", 0.31), TQDM.format("03", "12.00", 0.25)],
            TQDM.format("03–00:04", " 9.21–16.20", "-0.5–0.31"),
        ),
        (["10it [00:01, 7.1it/s]", "10it [00:01, 7.3it/s]"], "10it [00:01, 7.1–7.3it/s]"),
        ([RICH.format("03"), RICH.format("12")], "Working… ━━━━━━━━━━━━ 100% 0:00:03–0:00:12"),
        (
            [
                "Epoch 0/2 ━━━━━━ 8/8 0:00:01 • 0:00:00 7.10it/s v_num: 3.000",
                "Epoch 0/2 ━━━━━━ 8/8 0:00:01 • 0:00:00 7.10it/s v_num: 3.000",
            ],
            "Epoch 0/2 ━━━━━━ 8/8 0:00:01 • 0:00:00 7.10it/s v_num: 3.000",
        ),
        (
            [
                "\x1b[1m8/8\x1b[0m \x1b[32m━━━━━\x1b[0m \x1b[1m0s\x1b[0m 5ms/step - loss: 0.31",
                "8/8 ━━━━━ 0s 7ms/step - loss: 0.3",
            ],
            "8/8 ━━━━━ 0s 5–7ms/step - loss: 0.3–0.31",
        ),
    ],
    ids=["tqdm", "without a total", "rich", "Lightning", "Keras"],
)
def test_bars_with_the_same_counts(lines: list[str], whole: str) -> None:
    assert len(set(bars.keys(lines, "\n".join(lines)))) == 1
    assert bars.merged(lines) == whole


@pytest.mark.parametrize(
    "one, other",
    [
        (TQDM.format("03", 9, 1), TQDM.format("03", 9, 1).replace("50/50", "49/50").replace("100%", " 98%")),
        (TQDM.format("03", 9, 1), TQDM.format("03", 9, 1).replace("Epoch 1", "Epoch 2")),
        (TQDM.format("03", 9, 1), TQDM.format("03", 9, 1).replace("it/s", "s/it")),
        ("loss 0.31 at 100%", "loss 0.32 at 100%"),
        ("step 3/50 took 2 s", "step 3/50 took 3 s"),
    ],
)
def test_what_is_not_the_same(one: str, other: str) -> None:
    assert len(set(bars.keys([one, other], f"{one}\n{other}"))) == 2
