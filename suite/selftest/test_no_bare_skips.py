"""No test of this suite may skip itself: what a host lacks is UNTESTABLE with a typed reason, through one function.

The tree is read, not run, so that a skip in a branch that nobody takes is found too. Refused: ``pytest.skip``,
``importorskip``, ``xfail``, the marks ``skip``, ``skipif`` and ``xfail``, their unittest twins, ``SkipTest``, and a ``return`` in a
test function (a test that ends early passes without having looked).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.selftest

ROOT = Path(__file__).parents[2]
TREES = ("fixtures", "suite", "reports", "tools")
TYPED_SKIP = Path("fixtures/pytest_support/skips.py")
"""The one module that may raise a skip."""

SKIPS = frozenset({"skip", "skipif", "importorskip", "skipIf", "skipUnless", "SkipTest", "skipTest", "xfail"})
WORDS = re.compile(rf"\b(?:{'|'.join(sorted(SKIPS))})\b")
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where statements hold statements."""
OWNERS = frozenset({"pytest", "mark", "unittest", "case", "self", "outcomes"})
"""What these names hang on where they mean a test's skip (``pytest.skip``, ``pytest.mark.skip``, ``self.skipTest``)."""
MODULES = frozenset({"pytest", "unittest", "unittest.case", "_pytest.outcomes"})


def bare_skips(source: str) -> list[str]:
    """``line: what`` for every bare skip and every early return of a test function in a module's text."""
    words = WORDS.search(source) is not None
    if "def test" not in source and not words:
        return []  # nothing of it can be there: no need to parse
    found: list[tuple[int, str]] = []
    tree = ast.parse(source)
    for node in ast.walk(tree) if words else _statements(tree):  # where no word is, only a return can be
        if isinstance(node, ast.Attribute) and node.attr in SKIPS and _owner(node) in OWNERS:
            found.append((node.lineno, f"{_owner(node)}.{node.attr}"))
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found += [(node.lineno, f"import of {alias.name}") for alias in node.names if alias.name in SKIPS]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found += [(r.lineno, f"return in {node.name}") for r in _returns(node)]
    return [f"{line}: {what}" for line, what in sorted(found)]


def _statements(node: ast.AST, outside: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """Statements below a node, however deep, without the expressions in them (nine nodes in ten), nor what lies in ``outside``."""
    for name in BODIES:
        for child in getattr(node, name, ()):
            yield child
            if not isinstance(child, outside):
                yield from _statements(child, outside)


def _owner(node: ast.Attribute) -> str:
    value = node.value
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""


def _returns(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.Return]:
    """Returns of the function itself, not of functions inside it."""
    for node in _statements(function, outside=(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if isinstance(node, ast.Return):
            yield node


def _files() -> list[Path]:
    return [*sorted(p for tree in TREES for p in (ROOT / tree).rglob("*.py")), ROOT / "conftest.py"]


def test_no_module_of_the_suite_has_a_bare_skip() -> None:
    files = _files()
    assert any(p.name == Path(__file__).name for p in files), "the walk has to see at least this file"
    found = [
        f"{path.relative_to(ROOT)}:{skip}"
        for path in files
        if path.relative_to(ROOT) != TYPED_SKIP
        for skip in bare_skips(path.read_text(encoding="utf-8"))
    ]
    assert not found, "raise fixtures.errors.Untestable, or mark the test with needs(...):\n" + "\n".join(found)


SAMPLES = [
    ("import pytest\npytest.skip('x')", ["2: pytest.skip"]),
    ("import pytest\nraise pytest.skip.Exception('x')", ["2: pytest.skip"]),
    ("import pytest\nif 1:\n    def f(): pytest.importorskip('x')", ["3: pytest.importorskip"]),
    ("import pytest\n@pytest.mark.skipif(True, reason='x')\ndef test_a(): pass", ["2: mark.skipif"]),
    ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", ["2: mark.skip"]),
    ("import pytest\npytestmark = [pytest.mark.xfail]", ["2: mark.xfail"]),
    ("from pytest import skip as later\nlater('x')", ["1: import of skip"]),
    ("from pytest import mark\n@mark.skipif(1, reason='')\ndef test_a(): pass", ["2: mark.skipif"]),
    ("from unittest import SkipTest\nraise SkipTest", ["1: import of SkipTest"]),
    ("import unittest\n@unittest.skipIf(1, '')\ndef test_a(): pass", ["2: unittest.skipIf"]),
    ("class T:\n    def test_a(self):\n        self.skipTest('x')", ["3: self.skipTest"]),
    ("def test_a():\n    if True:\n        return\n    assert False", ["3: return in test_a"]),
    ("async def test_a():\n    for x in []:\n        return 1", ["3: return in test_a"]),
    ("def test_a():\n    try:\n        pass\n    except OSError:\n        return", ["5: return in test_a"]),
    (
        "def test_a():\n    with a:\n        match 1:\n            case _:\n                return",
        ["5: return in test_a"],
    ),
    ("if a:\n    pass\nelse:\n    def test_a():\n        while a:\n            return", ["6: return in test_a"]),
    ("def test_a():\n    def inner():\n        return 1\n    assert inner() == (lambda: 1)()", []),
    ("def helper():\n    return 1\nlines.skip(3)\nskip = 2", []),
]


@pytest.mark.parametrize(("source", "found"), SAMPLES)
def test_the_walk_sees_every_kind_of_skip(source: str, found: list[str]) -> None:
    assert bare_skips(source) == found


def test_the_typed_skip_is_the_only_one_and_is_there() -> None:
    assert bare_skips((ROOT / TYPED_SKIP).read_text(encoding="utf-8"))
