"""README's animated picture, docs/pictures/nbspawn.gif, from a real JupyterLab: ``python docs/animation.py``.

A cell becomes a program of four ranks, fails in one of them, is repaired, hangs, and is stopped. Nothing in it is
drawn but the mouse pointer, which a browser without a screen lacks. Where a reader would only wait, it is faster than
life. What is needed: docs/stage.py.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Locator
from stage import PATIENCE, PICTURES, Lab, close_sidebar, stage

PREPARED = """%load_ext nbspawn
import time, torch, torch.distributed as dist
from tqdm import tqdm
data = list(torch.randn(370, 8))  # for four ranks

def train(sample):
    time.sleep(0.02)
    return sample.square().mean()"""
TYPED = "%%spawn 4 -b gloo"
CELL = """
shard = data[100 * rank : 100 * (rank + 1)]
for step in tqdm(range(100)):
    loss = train(shard[step])
    dist.all_reduce(loss)
dist.barrier()"""
# What is replaced, and by what: all ranks take their whole shard, of which the last is shorter.
REPAIRS = (("step in tqdm(range(100))", "sample in tqdm(shard)"), ("shard[step]", "sample"))

_WINDOW = (966, 920)  # points, which are pixels here
_FRAMES = 7.0  # a second
_COLOURS = 255  # and one for what does not change between two frames
_ALIKE = 8  # of 255: the most by which two colours of a palette would differ in vain
_TYPING = 0.04  # seconds a character

_POINTER = """addEventListener("DOMContentLoaded", () => {
    document.body.insertAdjacentHTML("beforeend", `<svg id="pointer" width="16" height="24" viewBox="0 0 16 24"
        style="position: fixed; z-index: 10000; pointer-events: none; visibility: hidden">
        <path d="M1 1v19l5-5 3 7 3-1-3-7h6z" fill="black" stroke="white"/></svg>`);
    addEventListener("mousemove", event => Object.assign(document.getElementById("pointer").style,
        { left: `${event.clientX}px`, top: `${event.clientY}px`, visibility: "visible" }), true);
})"""


# The first start of ranks in a kernel is no part of the story.
_WARM_UP = r"""() => window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel
    .requestExecute({ code: "%%spawn 4 -b gloo\npass", silent: true }).done.then(() => null)"""


class Film:
    """Frames of a part of the page, each with the seconds for which it is shown."""

    def __init__(self, shown: Locator) -> None:
        self._page = shown.page
        box = shown.bounding_box()
        assert box
        self._clip = box
        self._frames: list[Image.Image] = []
        self._seconds: list[float] = []

    def hold(self, seconds: float) -> None:
        """One frame, for so long."""
        picture = self._page.screenshot(clip=self._clip, caret="initial")
        self._frames.append(Image.open(io.BytesIO(picture)).convert("RGB"))
        self._seconds.append(seconds)

    def until(self, shown: Callable[[], bool], speed: float = 1.0) -> None:
        """Frames until something is shown, so much faster than life."""
        end = time.monotonic() + PATIENCE
        while not shown():
            begun = time.monotonic()
            assert begun < end, "waited in vain"
            self.hold(0)
            self._page.wait_for_timeout(max(0, 1000 * (begun + speed / _FRAMES - time.monotonic())))
            self._seconds[-1] = (time.monotonic() - begun) / speed

    def type(self, text: str) -> None:
        """A key at a time."""
        for key in text:
            self._page.keyboard.press(key)
            self.hold(_TYPING)

    def point(self, at: Locator) -> None:
        """Move the mouse there."""
        box = at.bounding_box()
        assert box
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for left in (200, 120, 60, 20, 0):
            self._page.mouse.move(x + left, y - left)
            self.hold(1 / _FRAMES)

    def save(self, path: Path) -> None:
        """With one palette. Pillow joins frames that are the same, and stores of each what has changed."""
        whole = Image.new("RGB", (self._frames[0].width, sum(frame.height for frame in self._frames)))
        for number, frame in enumerate(self._frames):
            whole.paste(frame, (0, number * frame.height))
        palette = Image.new("P", (1, 1))
        palette.putpalette([band for colour in _commonest(whole) for band in colour])
        first, *rest = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self._frames]
        milliseconds = [round(1000 * seconds) for seconds in self._seconds]
        first.save(path, append_images=rest, save_all=True, duration=milliseconds, loop=0, optimize=True)


def _commonest(image: Image.Image) -> list[Any]:
    """Its commonest colours that the eye can tell apart: the rarer ones are those of few words, and not to be lost."""
    chosen: list[Any] = []
    for _, colour in sorted(image.getcolors(image.width * image.height) or (), reverse=True):
        if all(max(abs(one - other) for one, other in zip(colour, near, strict=True)) > _ALIKE for near in chosen):
            chosen.append(colour)
    return chosen[:_COLOURS]


def play(lab: Lab) -> Film:
    """All of it, of about 15 seconds."""
    notebook = lab.open("train.ipynb", PREPARED, CELL)
    close_sidebar(lab)
    notebook.run(0)
    lab.page.evaluate(_WARM_UP)
    output = notebook.outputs(1)
    film = Film(lab.page.locator(".jp-NotebookPanel"))

    select(lab, "")
    film.hold(0.3)
    film.type(TYPED)
    film.hold(0.4)
    notebook.start(1)
    error = output.filter(has_text="RankRaisedError")
    film.until(lambda: error.count() > 0)
    notebook.wait()
    film.hold(1.8)

    for old, new in REPAIRS:
        select(lab, old)
        film.hold(0.3)
        film.type(new)
    film.hold(0.3)
    notebook.start(1)
    stalled = output.filter(has_text="have to make the same calls")
    film.until(lambda: stalled.count() > 0, speed=6)
    film.hold(1.8)
    stop = output.get_by_role("button", name="Stop")
    film.point(stop)
    film.hold(0.5)
    stop.click()
    film.until(lambda: output.filter(has_text="KeyboardInterrupt").count() > 0, speed=2)
    notebook.wait()
    film.hold(1.5)
    return film


def select(lab: Lab, text: str) -> None:
    """Mark a text of the second cell, which is then being edited."""
    lab.page.evaluate(
        """text => {
            const { content } = window.jupyterapp.shell.currentWidget;
            content.activeCellIndex = 1;
            content.mode = "edit";
            const { editor } = content.activeCell;
            const at = content.activeCell.model.sharedModel.getSource().indexOf(text);
            editor.setSelection({ start: editor.getPositionAt(at), end: editor.getPositionAt(at + text.length) });
        }""",
        text,
    )


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with stage(*_WINDOW) as lab:
        lab.page.add_init_script(_POINTER)
        play(lab).save(PICTURES / "nbspawn.gif")


if __name__ == "__main__":
    main()
