"""Shared libraries that wheels expect of a host: taken from this machine with what they need, for a host that lacks them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tools.bundle.target import BundleError

OF_GLIBC = re.compile(
    r"^(linux-vdso|ld-linux.*|libc|libm|libdl|librt|libpthread|libresolv|libutil|libgcc_s|libstdc\+\+)\.so"
)
"""Never carried: they belong to the host's loader, and every host that runs Python has them."""


def loader_cache() -> dict[str, Path]:
    """Library name -> file, as this machine's loader resolves it."""
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    found: dict[str, Path] = {}
    for name, path in re.findall(r"^\s+(\S+) \(libc6,x86-64[^)]*\) => (\S+)$", listed, re.MULTILINE):
        found.setdefault(name, Path(path))
    return found


def needed(library: Path) -> set[str]:
    """Names of everything a library loads, itself not included. Raises BundleError when one is not found."""
    listed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    if missing := re.findall(r"^\s+(\S+) => not found", listed, re.MULTILINE):
        raise BundleError(f"{library} needs {', '.join(missing)}, which this machine lacks")
    return {name for name in re.findall(r"^\s+(\S+) => /", listed, re.MULTILINE) if not OF_GLIBC.match(name)}


def carry(names: tuple[str, ...], folder: Path) -> list[str]:
    """Copy libraries and what they need. Returns their names. Raises BundleError that names what this machine lacks."""
    cache = loader_cache()
    if missing := [name for name in names if name not in cache]:
        raise BundleError(
            f"this machine has no {', '.join(missing)} to carry; on Debian: apt-get install"
            " libnuma1 libibverbs1 ibverbs-providers libcurl4 libgssapi-krb5-2"
        )
    wanted = set(names).union(*(needed(cache[name]) for name in names)) if names else set()
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(wanted):
        shutil.copyfile(cache[name].resolve(), folder / name)
        (folder / name).chmod(0o755)
    return sorted(wanted)
