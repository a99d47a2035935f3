"""What must not leave: secrets from every text, machine-specific names from everything that is meant to be passed on.

Two levels. ``secrets_out`` is for the user's own terminal and files. ``Redactor`` also takes out private paths, host
names and addresses, for reports that are pasted into a public tracker.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from reports import records as r
from reports.history import History

SECRET = "[secret]"
_TOKENS = r"(?:hf|hub|auth|access|api|refresh|session|github|gitlab|gh|slack|bot)[_-]?token|(?-i:[A-Z0-9]+_TOKEN)"
_NAME = rf"[A-Za-z0-9_-]*(?:api[_-]?key|access[_-]?key|private[_-]?key|secret|passw(?:or)?d|passphrase|credentials?|{_TOKENS})(?:[_-]?(?:id|key))?"
SECRET_NAME = re.compile(rf"{_NAME}\Z", re.IGNORECASE)
"""Names of variables and options whose value is a secret (``HF_TOKEN``, ``--api-key``; not ``max_tokens``)."""

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), SECRET),
    # Forms that their issuers document: Hugging Face, OpenAI, GitHub, GitLab, Slack, Google, AWS, JSON web tokens.
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AIza)[A-Za-z0-9_-]{8,}"), SECRET),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), SECRET),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"), SECRET),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {SECRET}"),
    (re.compile(r"(://)[^\s/@:]+:[^\s/@]+@"), rf"\1{SECRET}@"),
    (re.compile(rf"(?i)(?<![A-Za-z0-9_-])({_NAME}[\"']?\s*[=:]\s*[\"']?)[^\s\"',}}]{{3,}}"), rf"\1{SECRET}"),
    (re.compile(rf"(?i)(?<!\S)(--?{_NAME}\s+)[^\s-]\S+"), rf"\1{SECRET}"),
)
_SHORTEST_SECRET = 8
"""A secret of the environment shorter than this many characters is not searched for: it would hit words."""


@functools.lru_cache(maxsize=1024)
def _is_secret_name(name: str) -> bool:
    return SECRET_NAME.fullmatch(name) is not None


def secrets_out(text: str) -> str:
    """The text without secrets: values of known forms, of names that say so, and of this process's own environment."""
    for name in filter(_is_secret_name, os.environ):
        value = os.environ[name]
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, SECRET)
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def one_line(text: str) -> str:
    """White space collapsed and control characters made visible, so that evidence cannot move a terminal's cursor."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else repr(c)[1:-1] for c in text).split())


def argv_without_secrets(argv: Iterable[str]) -> tuple[str, ...]:
    """A command line in which the value behind an option such as ``--api-key`` is gone."""
    out: list[str] = []
    hide = False
    for word in argv:
        out.append(SECRET if hide and not word.startswith("-") else secrets_out(word))
        hide = word.startswith("-") and _is_secret_name(word.lstrip("-"))
    return tuple(out)


_HOST_FIELDS = ("hostname", "host", "node", "nodename", "fqdn")
_WORDS_NOT_NAMES = frozenset({"localhost", "local", "host", "linux", "node", "main", "master", "runner", "worker"})
_PATH = re.compile(
    r"(?:(?<![\w./~$}…-])|(?<=file://)|(?<=\s-[A-Za-z])|(?=/(?:root|home/[\w.-]+)/\.))(?:/[\w.+@%=-]+){2,}/?"
)
"""The last way to begin: hidden folders of a home are a machine's own also where a log glued them to the line before."""
_PUBLIC_PATHS = ("proc", "sys", "dev", "health", "metrics", "v1", "v2", "version", "batch_query_keys")
"""First parts of paths that name no machine: the kernel's own, and endpoints of the servers."""
_KEPT_FROM = re.compile(r".*/(site-packages/.*|dist-packages/.*|(?:fixtures|suite|reports)/[\w./]+\.(?:py|toml))\Z")
_ADDRESS = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})(?![\w.]*\.)(:\d+)?\b")
_PRIVATE = re.compile(r"(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.")
_REMEMBERED = 200
"""Characters of the longest text whose public form a redactor remembers: names and units come by the ten thousand."""
_DataT = TypeVar("_DataT")


class Redactor:
    """Takes secrets, private paths, host names and addresses out of text and data.

    run_dir: paths inside it become relative to the run. hosts: names of machines to hide.
    """

    def __init__(self, run_dirs: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        self._run_dirs = sorted({d.rstrip("/") for d in run_dirs if len(d) > 1}, key=len, reverse=True)
        names = {h for h in hosts if len(h) > 2 and h.lower() not in _WORDS_NOT_NAMES}
        self._hosts = (
            re.compile(
                r"(?<![\w.-])(?:" + "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)) + r")(?![\w-])"
            )
            if names
            else None
        )
        self._known: dict[str, str] = {}

    @classmethod
    def of(cls, histories: Iterable[History], run_dir: str = "") -> Redactor:
        """A redactor for a run: its own folder, the machine that recorded it, and the machine that reports."""
        hosts = {socket.gethostname(), socket.gethostname().partition(".")[0]}
        for history in histories:
            for started in history.of(r.RunStarted):
                hosts.update(str(started.host[k]) for k in _HOST_FIELDS if isinstance(started.host.get(k), str))
        return cls([run_dir, os.path.realpath(run_dir)] if run_dir else [], hosts)

    def text(self, text: str) -> str:
        """One text."""
        if len(text) > _REMEMBERED:
            return self._text(text)
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._text(text)
        return known

    def _text(self, text: str) -> str:
        text = secrets_out(text)
        for run_dir in self._run_dirs:
            text = text.replace(run_dir + "/", "").replace(run_dir, ".")
        return self.names_out(_PATH.sub(_public_path, text))

    def names_out(self, text: str) -> str:
        """Only host names and addresses (loopback ones stay)."""
        text = _ADDRESS.sub(_public_address, text)
        return self._hosts.sub("[host]", text) if self._hosts else text

    def data(self, value: _DataT) -> _DataT:
        """The same struct (or plain data) with every text in it redacted."""
        plain = _walk(msgspec.to_builtins(value), self.text)
        return msgspec.convert(plain, type(value)) if isinstance(value, msgspec.Struct) else plain


def _public_path(match: re.Match[str]) -> str:
    path = match.group().rstrip("/")
    if path.split("/", 2)[1] in _PUBLIC_PATHS:
        return match.group()
    kept = _KEPT_FROM.match(path)
    return ".../" + (kept.group(1) if kept else path.rpartition("/")[2])


def _public_address(match: re.Match[str]) -> str:
    address, port = match.group(1), match.group(2) or ""
    if address.startswith("127.") or address == "0.0.0.0":
        return match.group()
    # Four numbers without a port may be a version (9.10.2.21): only private networks are surely addresses.
    return f"[address]{port}" if port or _PRIVATE.match(address) else match.group()


def _walk(value: Any, change: Callable[[str], str], name: str = "") -> Any:
    if isinstance(value, str):
        return SECRET if name and value and _is_secret_name(name) else change(value)
    if isinstance(value, Mapping):
        return {change(str(k)): _walk(v, change, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(v, str) for v in value):
            return [change(v) for v in argv_without_secrets(value)]
        return [_walk(v, change) for v in value]
    return value
