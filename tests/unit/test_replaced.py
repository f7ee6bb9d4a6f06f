"""What a cell's text says that it sets in modules and classes."""

from __future__ import annotations

import pytest

from nbspawn._carried.replaced import set_by


@pytest.mark.parametrize(
    ("text", "chains"),
    [
        ("np.mean = f", {("np", "mean")}),
        ("a.b.C.d = e.f = 1", {("a", "b", "C", "d"), ("e", "f")}),
        (
            "(config.lr, config.steps), *config.rest = values",
            {("config", "lr"), ("config", "steps"), ("config", "rest")},
        ),
        ("config.lr *= 2\nconfig.steps: int = 3", {("config", "lr"), ("config", "steps")}),
        (
            "if x:\n    for m.i in y:\n        try: m.a = 1\n        except E: m.b = 2",
            {("m", "i"), ("m", "a"), ("m", "b")},
        ),
        ("with open(f) as m.file: pass", {("m", "file")}),
        ("setattr(pd.DataFrame, 'twice', f); setattr(x, name, f)", {("pd", "DataFrame", "twice")}),
        ("def f():\n    np.mean = 1\nclass C:\n    np.sum = 1\nlambda: setattr(np, 'max', 1)", set()),
        ("'np.mean = f'\nf().x = y[0].z = 1\nx = np.mean == f", set()),
        ("get_ipython().run_cell_magic('time', '', 'm.a = 1\\n')", {("m", "a")}),
        ("get_ipython().run_cell_magic('bash', '', 'm.a = 1\\n')", set()),
        ("not python", set()),
    ],
)
def test_what_a_cell_sets(text: str, chains: set[tuple[str, ...]]) -> None:
    assert set(set_by(text, str)) == chains
