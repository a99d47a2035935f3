"""Checks are pure: what they import cannot read a file, a socket or a clock."""

import ast
from pathlib import Path

import pytest

import suite.checks

pytestmark = pytest.mark.selftest

ALLOWED = {
    "__future__",
    "array",
    "collections",
    "dataclasses",
    "itertools",
    "math",
    "re",
    "reports",
    "reports.history",
    "statistics",
    "suite.checks",
    "traceback",
    "typing",
}
"""``reports`` alone only for ``from reports import records``."""

MODULES = sorted(Path(suite.checks.__file__).parent.glob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Names of imported modules; ``from reports import x`` counts as ``reports`` only for records."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "reports" and {alias.name for alias in node.names} != {"records"}:
                module = "reports.<other>"
            names.add("suite.checks" if module.startswith("suite.checks") else module)
    return {name.split(".")[0] if name.startswith("collections") else name for name in names}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_checks_import_nothing_that_reaches_outside(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert imported(tree) <= ALLOWED
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}


@pytest.mark.parametrize(
    "text", ["import time", "from pathlib import Path", "from reports import evidence", "from fixtures import spec"]
)
def test_an_impure_import_is_seen(text: str) -> None:
    assert not imported(ast.parse(text)) <= ALLOWED
