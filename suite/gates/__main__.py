"""``python -m suite.gates`` prints docs/gates.md: every gate with its claim, how it can lie, its oracle, its proof.

A selftest compares the committed page with this output, so the page cannot fall behind the gates.
"""

from __future__ import annotations

import inspect
import sys

from fixtures.arguments import Parser
from suite.contract import Gate
from suite.gates import registry

FAMILIES = {
    "H": "Hash-seed parity",
    "P": "Prefix correctness",
    "I": "Identity",
    "D": "Degrades to recompute",
    "T": "Transport",
    "O": "Operability",
}


def page() -> str:
    """The whole page, ending with a newline."""
    lines = [
        "# Gates",
        "",
        "Made by `python -m suite.gates > docs/gates.md` from the gates themselves. A gate without a planted defect that",
        "is known to turn it red is marked UNPROVEN.",
        "",
    ]
    for family, title in FAMILIES.items():
        gates = sorted((g for g in registry().values() if g.id.split(".")[0] == family), key=lambda g: g.id)
        if gates:
            lines += [f"## {family}: {title}", ""]
            for gate in gates:
                lines += section(gate)
    return "\n".join(lines).rstrip() + "\n"


def section(gate: Gate) -> list[str]:
    """One gate: docstring, cases, needs, proof."""
    cases = list(gate.cases())
    core = [c.id.removeprefix(f"{gate.id}.") for c in cases if c.core]
    rest = [c.id.removeprefix(f"{gate.id}.") for c in cases if not c.core]
    needs = sorted({need for c in cases for need in c.needs})
    stack = f"{gate.min_engines} engine{'s' if gate.min_engines > 1 else ''}{' and a pool' if gate.needs_pool else ''}"
    out = [f"### {gate.id}", "", inspect.cleandoc(type(gate).__doc__ or ""), ""]
    out.append(f"- Needs: {stack}{', ' + ', '.join(needs) if needs else ''}")
    if core:
        out.append(f"- Cases of `make gates`: {', '.join(f'`{name}`' for name in core)}")
    if rest:
        out.append(f"- Further cases of `make gates-full`: {', '.join(f'`{name}`' for name in rest)}")
    if gate.judges_lmcache:
        out.append("- Judges LMCache too (`--stack lmcache-mooncake`)")
    out.append(f"- Proven by planted defects: {', '.join(gate.proof) if gate.proof else 'UNPROVEN'}")
    return [*out, ""]


if __name__ == "__main__":
    Parser(prog="python -m suite.gates", description=__doc__).parse_args()
    sys.stdout.write(page())
