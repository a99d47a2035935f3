"""The evidence format: the only module that knows how a run lies on disk.

A run is a folder::

    RUN/
      history-<worker>.jsonl   one record a line, flushed as it is written (a killed run keeps what it saw)
      verdicts.json            written at the end by the controller
      stacks/<stack>/...       logs and files of every process

Each line is a JSON object whose ``kind`` names the record type (``reports.records``). Readers ignore fields they do
not know and skip (and count) kinds they do not know, so that a newer run can be read as far as it is understood.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from reports import records as r
from reports.history import History
from reports.whole_lines import append_whole

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(r.AnyRecord)


class _Kind(msgspec.Struct):
    kind: str = ""


_KIND = msgspec.json.Decoder(_Kind)
_KNOWN = frozenset(str(cls.__struct_config__.tag) for cls in r.Record.__subclasses__())

HISTORY_GLOB = "history*.jsonl"


class EvidenceError(ValueError):
    """Evidence that cannot be read; the text names file and line and says what to do."""


def _finite(record: r.Record) -> r.Record:
    """The record, a metrics snapshot less what is no number: JSON has none but ``null``, which would make the whole run unreadable.

    What is left out is unknown to every judge (never zero), in the run itself as in one that is judged again.
    """
    if not isinstance(record, r.MetricsSnapshot) or all(map(math.isfinite, record.values.values())):
        return record
    return msgspec.structs.replace(record, values={k: v for k, v in record.values.items() if math.isfinite(v)})


class EvidenceWriter:
    """Appends records to one history file. Thread-safe; every record is in the kernel's hands when ``write`` returns.

    OSError where the folder or the file cannot be written; the file ends with a whole line all the same.
    """

    def __init__(self, run_dir: Path, worker: str = "main") -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.worker = worker
        self.path = run_dir / f"history-{worker}.jsonl"
        self._lock = threading.Lock()
        self._file: io.FileIO = self.path.open("ab", buffering=0)
        self._records: list[r.Record] = []
        self._listeners: list[Callable[[r.Record], None]] = []

    def write(self, record: r.Record) -> None:
        """Append one record."""
        record = _finite(record)
        line = _ENCODER.encode(record) + b"\n"
        with self._lock:
            append_whole(self._file.fileno(), line)
            self._records.append(record)
        for listener in self._listeners:
            listener(record)

    def listen(self, listener: Callable[[r.Record], None]) -> None:
        """Call ``listener`` after each record (progress display)."""
        self._listeners.append(listener)

    def history(self) -> History:
        """Everything written by this writer so far."""
        with self._lock:
            return History(self._records)

    def close(self) -> None:
        """Close the file; called once at the end of a run."""
        self._file.close()

    def __enter__(self) -> EvidenceWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LoadedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as read from disk. ``skipped`` counts lines this version does not understand, by reason."""

    path: str
    histories: dict[str, History]
    skipped: dict[str, int]

    @property
    def history(self) -> History:
        """Records of all workers, each worker's in order. Use ``histories`` where cases of workers must not mix."""
        return History(rec for h in self.histories.values() for rec in h)


def decode_line(line: bytes) -> r.Record | str:
    """One record, or the reason (a few words) why this version cannot read the line.

    Raises msgspec.DecodeError when the line is not JSON at all.
    """
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError:
        kind = _KIND.decode(line).kind  # parsed a second time only here: nearly every line is of a known kind
        if kind not in _KNOWN:
            return f"unknown kind {kind!r}"
        raise


def read_history(path: Path) -> tuple[History, dict[str, int]]:
    """Read one history file.

    A last line cut short by a kill is skipped and counted. Any other broken line raises EvidenceError.
    """
    lines = path.read_bytes().split(b"\n")
    found: list[r.Record] = []
    skipped: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            item = decode_line(line)
        except (msgspec.DecodeError, RecursionError) as exc:  # the latter: lists in lists without end
            if number == len(lines):  # no newline after it: the writer was killed inside this line
                skipped["cut short"] = skipped.get("cut short", 0) + 1
                continue
            raise EvidenceError(f"{path}:{number}: not a record of format {r.FORMAT_VERSION} or older: {exc}") from exc
        if isinstance(item, str):
            skipped[item] = skipped.get(item, 0) + 1
        else:
            if isinstance(item, r.RunStarted) and item.format_version > r.FORMAT_VERSION:
                raise EvidenceError(
                    f"{path}:{number}: evidence format {item.format_version} is newer than this version reads"
                    f" ({r.FORMAT_VERSION}); use a newer kvgates"
                )
            found.append(item)
    return History(found), skipped


def _session(path: Path) -> tuple[int, str]:
    """Order of evidence files: sessions as they ran (``history-main``, ``-main-2``, ... ``-main-10``), each one's workers by name."""
    worker, dash, number = path.stem.rpartition("-")
    return (int(number), worker) if dash and number.isdigit() else (1, path.stem)


def load_run(run_dir: Path) -> LoadedRun:
    """Read a run folder (or a single history file). Raises EvidenceError with the place and the mend."""
    paths: Iterable[Path]
    paths = [run_dir] if run_dir.is_file() else sorted(run_dir.glob(HISTORY_GLOB), key=_session)
    histories: dict[str, History] = {}
    skipped: dict[str, int] = {}
    for path in paths:
        histories[path.stem], miss = read_history(path)
        for reason, count in miss.items():
            skipped[reason] = skipped.get(reason, 0) + count
    if not histories:
        raise EvidenceError(f"{run_dir}: no {HISTORY_GLOB} here; give the folder of a run, e.g. reports/out/<run>")
    return LoadedRun(path=str(run_dir), histories=histories, skipped=skipped)
