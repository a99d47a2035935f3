"""Recorded command lines as portable shell: machine paths become variables, secrets never appear."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

from reports import records as r
from reports.redact import SECRET, SECRET_NAME, secrets_out

_PATH = re.compile(r"(?:(?<![\w./~$}\x00-])|(?<=file://)|(?<=^-[A-Za-z]))/(?:[\w.+@%=-]+/)*[\w.+@%=-]+/?")
_SYSTEM = ("bin", "sbin", "lib", "lib64", "usr", "etc", "proc", "sys", "dev", "opt")
"""Roots that mean the same on any Linux host, or are the business of its administrator."""
_SCRATCH = ("tmp", "run", "var")
_SKIPPED_ENV = ("PATH", "HOME", "PWD", "LD_LIBRARY_PATH", "LANG", "USER", "PYTHONPATH", "VIRTUAL_ENV")
"""Left to the reader's own environment."""
_MARK = "\x00"


def quote(word: str) -> str:
    """A word for the shell in double quotes; only the variables of this module are expanded."""
    text = _expanding(re.sub(r'([\\"$`])', r"\\\1", word))
    return text if re.fullmatch(r"[\w./:=@%+,-]+", text) else f'"{text}"'


def here_document(text: str) -> str:
    """Text for a here-document with an unquoted delimiter."""
    return _expanding(re.sub(r"([\\$`])", r"\\\1", text))


def _expanding(escaped: str) -> str:
    return re.sub(f"{_MARK}([A-Za-z0-9_]+){_MARK}", r"${\1}", escaped)


def variable(name: str) -> str:
    """A name as part of a shell variable."""
    return re.sub(r"\W", "_", name)


class Paths:
    """Turns the machine's paths into variables and remembers which were needed.

    ``WORK`` holds what the run's folder held, ``SHORT`` what lay in temporary directories (short: paths of UNIX
    sockets end at 107 bytes), ``MODEL_<n>`` the model directories, ``OTHER_<n>`` anything else. ``names_out`` takes names
    of machines out.
    """

    def __init__(self, run_dirs: Iterable[str], models: Iterable[str], names_out: Callable[[str], str] = str) -> None:
        self._names_out = names_out
        self._run_dirs = sorted(
            {d.rstrip("/") for d in run_dirs if d.startswith("/") and len(d) > 1}, key=len, reverse=True
        )
        self.models: dict[str, str] = {}
        for model in models:
            if model not in self.models:
                self.models[model] = f"MODEL_{len(self.models)}"
        self.others: dict[str, str] = {}
        self.directories: dict[str, None] = {}
        """Directories below WORK or SHORT that must exist, in the notation of ``portable``."""

    def portable(self, text: str) -> str:
        """Text with marks for variables; ``quote`` makes them shell."""
        for model, name in self.models.items():
            if text == model or (model.startswith("/") and model in text):
                text = text.replace(model, f"{_MARK}{name}{_MARK}")
        return self._names_out(_PATH.sub(lambda m: self._path(m.group()), secrets_out(text)))

    def _path(self, path: str) -> str:
        for run_dir in self._run_dirs:
            if path == run_dir or path.startswith(run_dir + "/"):
                return f"{_MARK}WORK{_MARK}{path.removeprefix(run_dir)}"
        parts = PurePosixPath(path).parts
        # A run recorded elsewhere: the layout of a run's folder is the same everywhere.
        if "stacks" in parts:
            return f"{_MARK}WORK{_MARK}/" + "/".join(parts[parts.index("stacks") :])
        if "site-packages" in parts or "dist-packages" in parts:
            at = parts.index("site-packages" if "site-packages" in parts else "dist-packages")
            return f"{_MARK}SITE{_MARK}/" + "/".join(parts[at + 1 :])
        if len(parts) < 2 or parts[1] in _SYSTEM:
            return path
        if parts[1] in _SCRATCH:
            return f"{_MARK}SHORT{_MARK}/" + "-".join(parts[-2:] if len(parts) > 3 else parts[-1:])
        name = self.others.setdefault(path, f"OTHER_{len(self.others)}")
        return f"{_MARK}{name}{_MARK}"

    def directory(self, text: str) -> None:
        """Note a directory (or the one a file lies in) that a unit expects."""
        if text.startswith((f"{_MARK}WORK{_MARK}/", f"{_MARK}SHORT{_MARK}/")):
            self.directories[str(PurePosixPath(text).parent) if PurePosixPath(text).suffix else text] = None


def roots(processes: Iterable[r.ProcessFacts]) -> list[r.ProcessFacts]:
    """The first process of every unit: the one whose parent is not in the unit. Servers of the pool before engines."""
    units: dict[str, list[r.ProcessFacts]] = {}
    for process in processes:
        units.setdefault(process.name, []).append(process)
    found = []
    for members in units.values():
        pids = {p.pid for p in members}
        found.append(next((p for p in members if p.ppid not in pids), members[0]))
    return sorted(found, key=lambda p: (not p.name.startswith(("etcd", "master")), not p.name.startswith("owner")))


def start_function(root: r.ProcessFacts, paths: Paths) -> list[str]:
    """Lines of a shell function that starts a unit as it was started, in a process group of its own."""
    name = variable(root.name)
    lines = [f"start_{name}() {{", f"  launch {name} env \\"]
    for key, value in sorted(root.env.items()):
        if key in _SKIPPED_ENV:
            continue
        if SECRET_NAME.fullmatch(key):
            lines.append(f'    {key}="${{{key}:?a secret of yours}}" \\')
            continue
        marked = paths.portable(value)
        paths.directory(marked)
        lines.append(f"    {key}={quote(marked)} \\")
    words = _argv(root.cmdline, paths)
    lines.append("    " + " ".join(words))
    return [*lines, "}"]


def _argv(argv: tuple[str, ...], paths: Paths) -> list[str]:
    words: list[str] = []
    hide = False
    for i, word in enumerate(argv):
        if i == 0 and PurePosixPath(word).name.startswith("python"):
            words.append('"$PYTHON"')
        elif hide and not word.startswith("-"):
            words.append(quote(SECRET))
        else:
            words.append(quote(paths.portable(word)))
        hide = word.startswith("-") and SECRET_NAME.fullmatch(word.lstrip("-")) is not None
    return words


def admin_url(processes: Iterable[r.ProcessFacts]) -> str:
    """URL of the master's HTTP interface from its command line, or ""."""
    for process in processes:
        flags = dict(word.lstrip("-").split("=", 1) for word in process.cmdline if word.startswith("-") and "=" in word)
        if "metrics_port" in flags:
            return f"http://{flags.get('metrics_host', '127.0.0.1')}:{flags['metrics_port']}"
    return ""
