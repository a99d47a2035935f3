"""Parity (family H): engines that should share can, and engines of one host do not share what they should not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from reports import records as r
from reports.history import History
from suite.checks.base import finding, too_few

SEED = "PYTHONHASHSEED"

DEFAULT_ALGORITHM = "sha256"
"""``--prefix-caching-hash-algo`` of vLLM 0.32.0 where it is not given."""

FIXED_DEFAULT = "vllm-none-hash"
"""Seed that vLLM 0.32.0 takes for the sha256 family where PYTHONHASHSEED is unset: the same in every process."""


@dataclass(frozen=True)
class EffectiveSeed:
    """What an engine's block hashes start from. seed None: random for each process, equal to nothing."""

    seed: str | None
    algorithm: str
    text: str

    def shares_with(self, other: EffectiveSeed) -> bool:
        """Equal blocks get equal hashes on both sides."""
        return self.algorithm == other.algorithm and self.seed is not None and self.seed == other.seed


def effective_seed(
    env: Mapping[str, str], algorithm: str = DEFAULT_ALGORITHM, *, fixed_default: str | None = FIXED_DEFAULT
) -> EffectiveSeed:
    """Resolve the seed as the tested release does: PYTHONHASHSEED as a text (``random`` too), else a default.

    fixed_default: None for releases that draw a random one for sha256 as well.
    """
    if SEED in env:
        return EffectiveSeed(env[SEED], algorithm, f"{SEED}={env[SEED]} ({algorithm})")
    if algorithm.startswith("xxhash") or fixed_default is None:
        return EffectiveSeed(None, algorithm, f"{SEED} unset: random in each process ({algorithm})")
    return EffectiveSeed(fixed_default, algorithm, f"{SEED} unset: fixed default ({algorithm})")


def check_seed_parity(
    processes: Mapping[str, Sequence[r.ProcessFacts]] | Sequence[r.ProcessSnapshot],
    algorithms: Mapping[str, str] | None = None,
    *,
    fixed_default: str | None = FIXED_DEFAULT,
) -> list[r.Finding]:
    """All processes of all engines start their block hashes from one seed. ``seed-mismatch`` names both sides.

    processes: engine -> its processes, as the kernel describes them, or snapshots of engines (the last of each counts).
    algorithms: engine -> hash algorithm where given.
    An engine of which no environment could be read is ``too-few-observations``, as are fewer than two engines.
    """
    if not isinstance(processes, Mapping):
        processes = {snapshot.unit: snapshot.processes for snapshot in processes}
    if len(processes) < 2:
        return too_few(f"{len(processes)} engines; parity needs two")
    blind = [name for name, facts in processes.items() if not any(p.env for p in facts)]
    if blind:
        return too_few(f"no environment of a process of {', '.join(blind)} could be read")
    sides = [
        (name, p, effective_seed(p.env, (algorithms or {}).get(name, DEFAULT_ALGORITHM), fixed_default=fixed_default))
        for name, facts in processes.items()
        for p in facts
        if p.env
    ]
    found: dict[tuple[str, str], r.Finding] = {}
    for (a, pa, sa), (b, pb, sb) in combinations(sides, 2):
        if (a, b) in found or sa.shares_with(sb) or (a == b and sa.seed == sb.seed):
            continue
        found[a, b] = finding(
            r.FindingCode.SEED_MISMATCH,
            f"{a} ({pa.title or pa.name}, pid {pa.pid}): {sa.text}; {b} ({pb.title or pb.name}, pid {pb.pid}): {sb.text};"
            " their block hashes differ, they share nothing",
            engines=[a, b],
            seeds=[sa.text, sb.text],
            pids=[pa.pid, pb.pid],
        )
    return list(found.values())


def check_stack_seeds(stack: r.StackUp | None) -> list[r.Finding]:
    """``check_seed_parity`` over the engines of a stack as it came up; algorithms from ``settings['hash_algorithm']``."""
    if stack is None:
        return too_few("no stack came up")
    processes = {e.name: [p for p in stack.processes if p.name == e.name] for e in stack.engines}
    algorithms = {
        e.name: str(e.settings["hash_algorithm"])
        for e in stack.engines
        if e.settings.get("hash_algorithm") not in (None, "", "upstream")
    }
    return check_seed_parity(processes, algorithms)


def check_lookup_channel(sockets: r.SocketSnapshot | None, *, path_pattern: str = "") -> list[r.Finding]:
    """No UNIX socket path is bound twice: neither by two units nor by two listeners.

    A path listed twice means that a later process unlinked and rebound it; the earlier listener hears nobody new. That
    is the cause, visible without waiting for the race. Only listeners count: accepted connections carry the
    listener's path as well. path_pattern: regular expression of the paths to judge.
    """
    judged: dict[str, dict[int, r.UnixSocket]] = {}
    for s in () if sockets is None else sockets.unix:
        if s.listening and s.path and re.search(path_pattern, s.path):
            judged.setdefault(s.path, {}).setdefault(s.inode, s)
    if not judged:
        return too_few("no listening UNIX socket of the stack was recorded", path_pattern=path_pattern)
    found: list[r.Finding] = []
    for path, by_inode in judged.items():
        if len(by_inode) < 2:
            continue
        holders = [f"{s.unit or 'unknown unit'} (pid {s.pid}, inode {s.inode})" for s in by_inode.values()]
        found.append(
            finding(
                r.FindingCode.SHARED_LOOKUP_CHANNEL,
                f"{path} is bound {len(holders)} times: {', '.join(holders)}",
                path=path,
                units=sorted({s.unit for s in by_inode.values()}),
                inodes=sorted(by_inode),
            )
        )
    return found


LOOKUP_PATH = "lookup"
"""Part of the IPC path of vLLM's lookup channel (``.../lookup_rpc_port_<n>_...``), 0.26 to 0.32."""


def check_lookup_channels(history: History, engines: Sequence[str]) -> list[r.Finding]:
    """``check_lookup_channel`` on the newest socket list of a case, with its control.

    Control: every engine named holds a listening lookup socket; else the list was not read right (``no-control``).
    """
    sockets = history.last(r.SocketSnapshot)
    found = check_lookup_channel(sockets)
    holders = {s.unit for s in (sockets.unix if sockets else ()) if s.listening and LOOKUP_PATH in s.path}
    missing = [name for name in engines if name not in holders]
    if not engines or missing:
        who = ", ".join(missing) or "no engine"
        text = f"no listening lookup socket of {who} in the kernel's list: it proves nothing"
        found.append(finding(r.FindingCode.NO_CONTROL, text, missing=missing, holders=sorted(holders)))
    return found
