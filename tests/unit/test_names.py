"""Which variables a cell uses: cells as users write them, IPython's own transformation, no notebook needed."""

from __future__ import annotations
import __future__

import builtins
from textwrap import dedent

import pytest

from nbspawn._payload.names import Names, names_used


def used(source: str, flags: int = 0) -> Names:
    """Names used, by IPython's rules, without builtins."""
    from IPython.core.inputtransformer2 import TransformerManager

    names = names_used(dedent(source), "<cell>", TransformerManager().transform_cell, flags)
    plain = frozenset(dir(builtins))
    return Names(names.required - plain, names.optional - plain, names.mentioned, names.annotated - plain)


@pytest.mark.parametrize(
    ("source", "required", "optional"),
    [
        ("x = 1\nprint(x)", "", ""),
        ("print(x)\nx = 1", "x", ""),
        ("x += 1", "x", ""),
        ("x: int = y\nz = x", "y", ""),
        ("del x", "x", ""),
        ("x = 1\ndel x\nx", "", "x"),
        ("a.b = c[d]", "a c d", ""),
        ("a, (b, *c) = data\na, b, c", "data", ""),
        ("import torch.nn as nn, os.path\nnn.Linear(n, os.cpu_count())", "n", ""),
        ("from math import pi as p\np", "", ""),
        ("@deco\ndef f(a, b=base, *, c: note = 1):\n    local = a + free\n    return local", "deco base free", "note?"),
        ("def f(n):\n    return f(n - 1)", "", ""),
        ("lambda x: x + y", "y", ""),
        ("[a * k for a in rows if a]", "k rows", ""),
        ("a = [[c for c in r] for r in rows]\nprint(a)", "rows", ""),
        ("class C(B):\n    size = n\n    twice = size * 2\n    def f(self):\n        return size, C", "B n size", ""),
        ("for i in range(n):\n    i", "n", ""),
        ("for i in range(n):\n    loss = f(i)\nprint(loss, i)", "f n", "i loss"),
        ("while go:\n    last = 1\nlast", "go", "last"),
        (
            "for i in rows:\n    if i < low:\n        continue\n    if i > high:\n        break\n    a = i\na",
            "high low rows",
            "a",
        ),
        ("if flag:\n    a = b = 1\nelse:\n    a = 2\na, b", "flag", "b"),
        ("with open(path) as (fh, gh):\n    text = fh.read()\ntext, gh", "path", ""),
        ("with a as b.c[d]:\n    pass", "a b d", ""),
        ("try:\n    import z\nexcept ImportError as e:\n    z = e\nz", "", ""),
        ("try:\n    y = 1\nexcept Err:\n    pass\nelse:\n    w = y\nfinally:\n    q = y\nq, w", "Err", "w y"),
        ("match p:\n    case [a, *b] if a > k:\n        a, b\n    case {'x': c, **d}:\n        c, d\nc", "k p", "c"),
        ("match p:\n    case K.A | Point(x=K.B) | {K.C: _}:\n        pass", "K Point p", ""),
        ("with suppress(ImportError):\n    import fast\n    fast.on()\nfast", "suppress", "fast"),
        ("with contextlib.suppress(E) as s, a:\n    y = 1\ny", "E a contextlib", "y"),
        ("if (n := len(data)) > 1:\n    print(n)", "data", "n"),
        ("def f():\n    return model, later\nmodel = 1\nif x:\n    later = 1", "x", "later model"),
        ("def f():\n    global total\n    total = 1\nf()\ntotal", "", "total"),
        ("await work(x)\nasync for i in y:\n    i\nasync with z as w:\n    w", "work x y z", ""),
        ("def f():\n    def g():\n        return deep\n    return g", "deep", ""),
        ("def f():\n    x = 1\n    return [x for _ in y]", "y", ""),
    ],
)
def test_python(source: str, required: str, optional: str) -> None:
    names = used(source)
    # Annotations are loaded where the function is defined, or by a function of their own: both are right.
    maybe = {name.rstrip("?") for name in optional.split() if name.endswith("?")}
    assert names.required - maybe == set(required.split())
    assert names.optional - maybe == {name for name in optional.split() if not name.endswith("?")}


@pytest.mark.parametrize(
    ("source", "optional"),
    [
        ("!echo {x + y[0]} $z", "x y z"),
        ("files = !ls {folder}\nfiles", "folder"),
        ("folder = '.'\nfiles = !ls {folder}", ""),
        ("%time f(x)", "f x"),
        ("def go():\n    !ls {here}", "here"),
        ("%%time\ny = g(x)\ny", "g x"),
        ("%%bash\nls {place} | while read x; do echo $x; done", "place x"),
    ],
)
def test_magics_are_soft(source: str, optional: str) -> None:
    names = used(source)
    assert names.required == set()
    assert names.optional == set(optional.split())


def test_words_in_strings() -> None:
    assert used("df.query('a > @limit')").mentioned == {"a", "limit"}
    assert used("f'{x} y'; x['key']").mentioned == {"y", "key"}


@pytest.mark.parametrize(
    ("source", "in_strings", "postponed"),
    [
        ("def f(a: A, *b: 'B', c: list['C'] = d) -> E | None: ...", "B C", "A E"),
        ("x: A = y\nz: 'np.ndarray'", "np ndarray", "A"),
        ("class K(B, list['C']):\n    a: 'A'\n    def m(self, o: K): ...", "A C", ""),
        ("T = TypedDict('T', {'x': 'X'})\nR = typing.NamedTuple('R', [('y', 'Y')])", "T x X R y Y", ""),
        ("Tree = dict[str, 'Tree']\nOptional['Leaf'], config['no']", "Tree Leaf", ""),
        ("lambda x: 'no', print('no')", "", ""),
        ("async def f(a: A):\n    def g(b: B): ...\n    c: C = 1", "", "A B C"),
    ],
)
def test_annotations(source: str, in_strings: str, postponed: str) -> None:
    """Names in strings; where annotations are not evaluated, all: no code loads them then."""
    assert used(source).annotated == set(in_strings.split())
    earlier = used(source, __future__.annotations.compiler_flag)
    assert earlier.annotated == set(in_strings.split())
    assert earlier.optional == set(postponed.split())
    assert not earlier.required & earlier.optional
    assert used(f"from __future__ import annotations\n{source}") == earlier


def test_bad_source_is_a_syntax_error() -> None:
    for source in ("x = (", "return 5", "def f(a, a): pass"):
        with pytest.raises(SyntaxError) as caught:
            used(source)
        assert caught.value.filename == "<cell>"


def test_empty_cell() -> None:
    assert used("") == used("# %%spawn 4\n") == Names(frozenset(), frozenset())
