"""Reads the metric families that a vLLM release declares from its source, without importing it.

``python -m suite.selftest.metric_families 0.32.0=PATH ...`` prints ``golden/metric_families.toml``; PATH is a folder that
holds ``vllm/`` (an installed release, or an unpacked wheel).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("v1/metrics", "distributed/kv_transfer/kv_connector/v1/mooncake/store")
PREFIXES = (
    "vllm:prefix_cache",
    "vllm:external_prefix_cache",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_",
    "vllm:kv_cache_usage",
    "vllm:mooncake_store",
)


def families(root: Path) -> dict[str, list[str]]:
    """Family name -> its own labels (beside ``model_name`` and ``engine``), for the families the suite may read."""
    found: dict[str, list[str]] = {}
    for source in SOURCES:
        for path in sorted((root / "vllm" / source).rglob("*.py")):
            for name, labels in _declared(ast.parse(path.read_text())):
                if name.startswith(PREFIXES):
                    found[name] = labels
    return found


def _declared(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Constructor calls with ``name="vllm:..."``; labels are the string constants of ``labelnames=`` or of a local list."""
    lists = {
        target.id: _strings(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("labelnames")
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = {k.arg: k.value for k in node.keywords if k.arg}
        name = keywords.get("name")
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and "labelnames" in keywords:
            labels = keywords["labelnames"]
            own = lists.get(labels.id, []) if isinstance(labels, ast.Name) else _strings(labels)
            yield name.value, [label for label in own if label not in ("model_name", "engine")]


def _strings(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def to_toml(releases: dict[str, Path]) -> str:
    """The golden file's text."""
    lines = ["# Metric families that releases declare; written by `python -m suite.selftest.metric_families`."]
    for version, root in releases.items():
        lines.append(f'\n["{version}"]')
        for name, labels in sorted(families(root).items()):
            lines.append(f'"{name}" = [{", ".join(repr(label) for label in labels)}]'.replace("'", '"'))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    pairs = (argument.split("=", 1) for argument in sys.argv[1:])
    sys.stdout.write(to_toml({version: Path(root) for version, root in pairs}))
