"""``python -m tools.bundle TARGET``: resolve, fetch, slim, pack, and write the manifest and the installer beside the parts."""

from __future__ import annotations

import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fixtures.arguments import Parser
from tools.bundle import libraries, pack, slim
from tools.bundle.resolve import Closure, pip_fetch, resolve
from tools.bundle.target import BundleError, Target, load_target, with_releases

ROOT = Path(__file__).resolve().parent.parent.parent
ON_TARGET = Path(__file__).parent / "on_target"
PART_MIB = 48
"""Small enough for most channels into a closed network; ``--part-mib`` sets another size."""


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"bundle: {text}\n")
    sys.stdout.flush()


def build(target: Target, out: Path, wheelhouse: Path, part_mib: int) -> None:
    """Write a bundle into ``out``, which is replaced. Raises BundleError."""
    base = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    own = [] if target.spec.onto else base
    closure = resolve(target, [*target.spec.want, *own], pip_fetch(target, wheelhouse, say))
    fetched = sum(wheel.stat().st_size for wheel in closure.wheels.values())
    say(
        f"{len(closure.wheels)} wheels to bring ({fetched >> 20} MiB), {len(closure.on_host)} distributions used of the host"
    )
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        tree = Path(scratch) / "tree"
        cuts = slim.unpack(closure.wheels.values(), tree / "site", target)
        carried = libraries.carry(target.spec.libraries, tree / "lib")
        unpacked = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
        say(f"{unpacked >> 20} MiB after the cuts; compressing (a few minutes)")
        parts = pack.pack(tree, out, target.spec.name, part_mib << 20)
    manifest = describe(target, closure, cuts, carried, parts, unpacked)
    (out / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    for script in ("install.sh", "install.py"):
        shutil.copyfile(ON_TARGET / script, out / script)
    for part in parts:
        say(f"{out / part.name}: {part.size_bytes / (1 << 20):.1f} MiB  sha256 {part.sha256}")
    where = f" (the one that a bundle of {target.spec.onto} is in)" if target.spec.onto else ""
    say(f"on the target, with all of these files in one folder: sh install.sh PREFIX{where}")


def describe(
    target: Target, closure: Closure, cuts: slim.Cuts, carried: list[str], parts: list[pack.Part], unpacked: int
) -> dict[str, Any]:
    """The manifest: what is in, what was cut and why, and what the installer has to check."""
    spec = target.spec
    return {
        "format": 1,
        "target": spec.name,
        "onto": spec.onto,
        "python": spec.python,
        "machine": spec.machine,
        "parts": parts,
        "unpacked_bytes": unpacked,
        "wheels": sorted(wheel.name for wheel in closure.wheels.values()),
        "from_host": closure.on_host,
        "left_out": closure.left_out,
        "unmet_on_host": closure.unmet,
        "accepted": spec.accept,
        "demands": {
            name: {"specifier": str(demand.specifier), "by": ", ".join(sorted(demand.by))}
            for name, demand in sorted(closure.demands.items())
        },
        "cuts": {
            "reasons": {**spec.drop, **spec.strip},
            "dropped_files_bytes": cuts.dropped,
            f"gpu_code_not_for_sm_{spec.cuda_arch}_bytes": cuts.gpu_code,
            "debug_symbols_bytes": cuts.symbols,
        },
        "libraries": spec.libraries,
        "carried": carried,
        "libraries_into": spec.libraries_into,
        "host_libraries": spec.host_libraries,
        "checks": spec.checks,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.bundle", description=__doc__)
    parser.add_argument("target", help="a TOML file, or the name of one in tools/bundle/targets")
    parser.add_argument(
        "--want",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="another release of something the target wants (may be given again)",
    )
    parser.add_argument("--out", type=Path, help="folder to write (default: bundle/NAME)")
    parser.add_argument("--wheelhouse", type=Path, default=ROOT / "wheelhouse", help="where fetched wheels are kept")
    parser.add_argument("--part-mib", type=int, default=PART_MIB)
    given = parser.parse_args(argv)
    try:
        if given.part_mib < 1:
            raise BundleError(f"--part-mib {given.part_mib}: wants 1 or more")
        target = with_releases(load_target(given.target), given.want)
        build(target, given.out or ROOT / "bundle" / target.spec.name, given.wheelhouse, given.part_mib)
    except BundleError as exc:
        sys.stderr.write(f"bundle: {exc}\n")
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
