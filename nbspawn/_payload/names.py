"""Which of the notebook's variables a cell uses: read off its source, without running it.

There are three answers, because a rank gets its variables before it runs and a guess in either direction hurts:
a name that was left out is a ``NameError`` in the rank, and one too many may be a lock that cannot travel, or a
gigabyte.

- **required**: loaded where the cell cannot have bound it before.
- **optional**: perhaps bound before (in a loop's body, by one branch only, by the time that a function defined earlier
  is called), or only named in the text of a magic, or in annotations that are not evaluated. Sent where it
  can travel, left out without a word where it cannot.
- not used: surely bound by the cell before it is loaded.

Beside these, the words in its strings may be names of variables (_payload/mentioned.py), and annotations may name some
that no code loads (_payload/annotated.py).

Control flow is followed on the syntax tree; what a straight piece of code loads is taken from its compiled form, so
that parameters, locals, comprehension variables and scoping rules are the compiler's business and not ours.
"""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import inspect
import io
import operator
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import NamedTuple

from nbspawn._payload import annotated, mentioned

_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"}
_STORES = {"STORE_NAME", "STORE_GLOBAL"}
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}

_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_IN_COMMAND = re.compile(r"\{([^{}]*)\}|\$([^\W\d]\w*)")  # what IPython expands in `!command {expression} $name`

_SHELL_CALLS = {"system", "getoutput", "run_line_magic", "run_cell_magic"}


class Names(NamedTuple):
    """Names that a cell loads, builtins among them: the caller keeps those that the notebook has a variable for."""

    required: frozenset[str]
    optional: frozenset[str]
    mentioned: frozenset[str] = frozenset()
    """Words in its strings."""
    annotated: frozenset[str] = frozenset()
    """Words in the strings of its annotations."""


def ends_silent(source: str, transform: Callable[[str], str]) -> bool:
    """Does the cell end with a semicolon, IPython's way of not showing the value of the last expression?"""
    if ";" not in source:
        return False
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(transform(source)).readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return [token.string for token in tokens if token.type not in blank][-1:] == [";"]


FUTURES: int = functools.reduce(
    operator.or_, (getattr(__future__, x).compiler_flag for x in __future__.all_feature_names)
)
"""The compiler's flags that ``from __future__ import ...`` sets."""


def check(text: str, filename: str, flags: int = 0) -> int:
    """Raises ``SyntaxError``, as compiling would, where ``text`` is no cell in Python. The compiler's ``flags`` are
    those that earlier cells have set; returns them with those that this one sets."""
    try:
        return _compile(text, filename, flags).co_flags & FUTURES
    except SyntaxError as error:
        if error.text is None and error.lineno:  # `return` outside a function and the like: the compiler has no source
            error.text = "".join(text.split("\n")[error.lineno - 1 : error.lineno])
        raise


def names_used(source: str, filename: str, transform: Callable[[str], str], flags: int = 0) -> Names:
    """The global names that the cell ``source`` loads before it surely binds them itself.

    ``transform`` turns IPython's syntax into Python (``shell.transform_cell``); ``filename`` is only for errors. The
    compiler's ``flags`` are those that earlier cells have set.

    Raises ``SyntaxError``, as compiling the cell would, where the source is no Python.
    """
    text = transform(source)
    flags = check(text, filename, flags)
    only_parse = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(text, filename, "exec", flags | only_parse, dont_inherit=True)
    cell = _Cell(filename, transform, flags)
    bound = cell.follow(tree.body, frozenset())
    # A function's body runs later than where it stands: what the cell binds by its end may serve it, or come too late.
    cell.optional |= cell.deferred & (bound | cell.perhaps)
    cell.required |= cell.deferred - cell.optional
    # Every rank has a shell of its own, and dunder names describe the module that the code runs in.
    required = frozenset(name for name in cell.required if name != "get_ipython" and not _is_dunder(name))
    optional = frozenset(name for name in cell.optional - required if not _is_dunder(name))
    names, words = annotated.in_source(tree)
    if flags & __future__.annotations.compiler_flag:  # then these are not loaded, and may be asked for later
        optional |= {name for name in names - required - bound if not _is_dunder(name)}
    loaded = required | optional
    return Names(required, optional, mentioned.in_source(tree) - loaded, frozenset(words - loaded))


def names_bound(source: str) -> frozenset[str]:
    """The global names that the cell ``source`` binds, or perhaps does; none where it is no Python."""
    try:
        code = _compile(source, "<cell>", 0)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(one.argval for one in dis.get_instructions(code) if one.opname in _STORES)


class _Cell:
    """A walk over a cell. ``perhaps`` are the names bound so far by code that may not have run."""

    def __init__(self, filename: str, transform: Callable[[str], str], flags: int) -> None:
        self.filename = filename
        self.transform = transform
        self.flags = flags
        self.required: set[str] = set()
        self.optional: set[str] = set()
        self.deferred: set[str] = set()
        self.perhaps: set[str] = set()

    def follow(self, body: Sequence[ast.stmt], bound: frozenset[str]) -> frozenset[str]:
        """Walk the statements with ``bound`` as the names surely bound before; gives those surely bound after."""
        for statement in body:
            bound = self._statement(statement, bound)
        return bound

    def _statement(self, statement: ast.stmt, bound: frozenset[str]) -> frozenset[str]:
        if isinstance(statement, ast.If):
            bound = self._straight(statement.test, bound)
            return self.follow(statement.body, bound) & self.follow(statement.orelse, bound)
        if isinstance(statement, ast.While):
            bound = self._straight(statement.test, bound)
            self.follow(statement.body, bound)
            self.follow(statement.orelse, bound)
            return bound
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            bound = self._straight(statement.iter, bound)
            self.follow(statement.body, self._target(statement.target, bound))
            self.follow(statement.orelse, bound)
            return bound
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                bound = self._straight(item.context_expr, bound)
                if item.optional_vars is not None:
                    bound = self._target(item.optional_vars, bound)
            after = self.follow(statement.body, bound)
            return bound if any(_swallows(item.context_expr) for item in statement.items) else after
        if isinstance(statement, ast.Match):
            bound = self._straight(statement.subject, bound)
            for case in statement.cases:
                for expression in _compared(case.pattern):
                    self._straight(expression, bound)
                captured = self._bind(bound, _captures(case.pattern))
                if case.guard is not None:
                    captured = self._straight(case.guard, captured)
                self.follow(case.body, captured)
            return bound
        # TryStar is new in Python 3.11, and looks the same.
        if isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
            return self._try(statement, bound)  # type: ignore[arg-type]
        if isinstance(statement, (ast.Break, ast.Continue)):
            return bound  # uses nothing, and cannot be compiled without its loop
        return self._straight(statement, bound)

    def _try(self, statement: ast.Try, bound: frozenset[str]) -> frozenset[str]:
        after = self.follow(statement.orelse, self.follow(statement.body, bound))
        for handler in statement.handlers:
            caught = self._straight(handler.type, bound) if handler.type is not None else bound
            if handler.name is not None:
                caught = self._bind(caught, {handler.name})
            after &= self.follow(handler.body, caught)
        return after | self.follow(statement.finalbody, bound)

    def _target(self, target: ast.expr, bound: frozenset[str]) -> frozenset[str]:
        """What `for` and `with` assign to: the same names as an assignment, which the compiler knows how to read."""
        return self._straight(ast.Assign(targets=[target], value=ast.Constant(value=None)), bound)

    def _straight(self, node: ast.stmt | ast.expr, bound: frozenset[str]) -> frozenset[str]:
        """A piece without branches of its own: it loads what it loads, and then its stores are sure."""
        if isinstance(node, ast.expr):
            node = ast.Expr(value=node)
        module = ast.Module(body=[node], type_ignores=[])
        code = _compile(ast.fix_missing_locations(ast.copy_location(module, node)), self.filename, self.flags)
        for name in self._texts(node):
            if name not in bound:
                self.optional.add(name)
        stored = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _STORES}
        # `x and (n := 5)`: whether a walrus was reached is more than we want to know.
        walrus = {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr) and n.target.id in stored}
        self.perhaps |= walrus
        own = {node.name} if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else set()
        self._loads(code, bound, bound | own)
        if isinstance(node, ast.Delete):
            return bound - {target.id for target in node.targets if isinstance(target, ast.Name)}
        return self._bind(bound, stored - walrus)

    def _bind(self, bound: frozenset[str], names: set[str]) -> frozenset[str]:
        self.perhaps |= names
        return bound | names

    def _loads(self, code: CodeType, bound: frozenset[str], later: frozenset[str]) -> None:
        """Note what ``code`` loads now, and for the function bodies in it (they may know ``later``) what they will."""
        local: set[str] = set()  # a class body stores into the class, not into the notebook
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in _LOADS and name not in bound and name not in local:
                (self.optional if name in self.perhaps else self.required).add(name)
            elif instruction.opname == "STORE_NAME" and code.co_name != "<module>":
                local.add(name)
        for inner in _inner(code):
            if not inner.co_flags & inspect.CO_OPTIMIZED or inner.co_name in _COMPREHENSIONS:
                self._loads(inner, bound, later)
                continue
            for function in (inner, *_inner(inner, deep=True)):
                for instruction in dis.get_instructions(function):
                    if instruction.opname in _LOADS and instruction.argval not in later:
                        self.deferred.add(instruction.argval)
                    elif instruction.opname == "STORE_GLOBAL":
                        self.perhaps.add(instruction.argval)

    def _texts(self, node: ast.AST) -> Iterator[str]:
        """Names in the texts that ``node`` hands to IPython: `!commands`, `%magics` and `%%magics`."""
        for call in ast.walk(node):
            if not (
                isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _SHELL_CALLS
            ):
                continue
            shell = call.func.value
            if not (
                isinstance(shell, ast.Call) and isinstance(shell.func, ast.Name) and shell.func.id == "get_ipython"
            ):
                continue
            texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if call.func.attr in {"system", "getoutput"}:
                for text in texts:
                    yield from _in_command(text)
                continue
            yield from _IDENTIFIER.findall(" ".join(texts[1:2]))
            for body in texts[2:]:
                try:
                    names = names_used(body, self.filename, self.transform, self.flags)
                except SyntaxError:  # %%bash, %%html: a language of its own, in which IPython may still expand {names}
                    yield from _in_command(body)
                else:
                    yield from names.required | names.optional


def _compile(source: str | ast.Module, filename: str, flags: int) -> CodeType:
    code = compile(source, filename, "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def _inner(code: CodeType, deep: bool = False) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            if deep:
                yield from _inner(constant, deep)


def _swallows(manager: ast.expr) -> bool:
    """Is it ``contextlib.suppress(...)``, after which the body may not have run to its end?"""
    called = manager.func if isinstance(manager, ast.Call) else None
    return getattr(called, "id", getattr(called, "attr", "")) == "suppress"


def _compared(pattern: ast.pattern) -> Iterator[ast.expr]:
    """What the pattern evaluates: ``Color.RED``, the class in ``Point(x=0)``."""
    for node in ast.walk(pattern):
        if isinstance(node, ast.MatchValue):
            yield node.value
        elif isinstance(node, ast.MatchClass):
            yield node.cls
        elif isinstance(node, ast.MatchMapping):
            yield from node.keys


def _captures(pattern: ast.pattern) -> set[str]:
    names = set()
    for node in ast.walk(pattern):
        if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name is not None:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest is not None:
            names.add(node.rest)
    return names


def _in_command(text: str) -> Iterator[str]:
    for expression, name in _IN_COMMAND.findall(text):
        yield from _IDENTIFIER.findall(expression or name)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
