"""The switch of a lying connector: which lie is told at the moment, and the journal of the lies that were told.

Both sides of it: ``Switch`` lives in the engine's processes (one in the scheduler's, one in each worker's) and polls a
control file, so that one pair of engines serves many defects. ``Remote`` is the harness's hand on it. Standard library
only: the engine imports it.

Files, in the engine's own directory (the one that holds its Mooncake configuration):

* ``lying.json``: the control file, replaced as a whole: ``{"generation": 3, "defect": "foreign-block", "rate": 0.02, ...}``
* ``lying-<role>.jsonl``: the journal, one line an event: ``ack`` (this process now acts by that generation), ``lie``
  (with the number of wrong acts), ``load`` (keys that were read), ``asked`` is the running number of occasions to lie.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

CONTROL_NAME = "lying.json"

ROLES = ("scheduler", "worker")

POLL_S = 0.05
"""How often a process looks at its control file."""


@dataclass(frozen=True)
class Setting:
    """What a connector does now. ``rate``: probability of a lie per occasion (a block, or a request; see the defect)."""

    generation: int = 0
    defect: str = ""
    """"" tells the truth."""
    rate: float = 1.0
    delay_s: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, data: dict[str, Any]) -> Setting:
        """From JSON; other keys are ignored (the same table holds the connector's own options)."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


class Switch:
    """The engine's side: follows the control file, decides each occasion, writes the journal.

    role: ``scheduler`` or ``worker``. known: names of defects; any other is refused (journal event ``refused``) and the
    setting before it stays. settle: called before a new setting is acknowledged (what is still under way is finished).
    """

    def __init__(
        self,
        directory: Path,
        role: str,
        initial: Setting,
        known: frozenset[str],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        if initial.defect and initial.defect not in known:
            raise ValueError(f"no defect {initial.defect!r}; known: {', '.join(sorted(known))}")
        self.now = initial
        self.changed = threading.Event()
        """Set, and replaced by a new one, whenever the setting changes: a lie that waits waits for this."""
        self._known = known
        self._settle = settle
        self._control = directory / CONTROL_NAME
        self._journal = (directory / f"lying-{role}.jsonl").open("ab", buffering=0)
        self._lock = threading.Lock()
        self._random = self._generator()
        self._asked = 0
        self._stop = threading.Event()
        self.write("ack", pid=os.getpid())
        self._thread = threading.Thread(target=self._follow, name="lying-switch", daemon=True)
        self._thread.start()

    # Deciding -------------------------------------------------------------------------------------------------------
    def lies(self, defect: str) -> bool:
        """This defect is on (whatever its rate)."""
        return self.now.defect == defect

    def choose(self, occasions: int) -> list[int]:
        """Which of so many occasions to lie on; the same seed and order of occasions give the same lies."""
        with self._lock:
            self._asked += occasions
            drawn = [i for i in range(occasions) if self._random.random() < self.now.rate]
        self.write("asked", asked=self._asked)
        return drawn

    def chosen_by(self, key: bytes) -> bool:
        """A decision that every engine takes alike for the same key (keys must match between saver and reader)."""
        digest = hashlib.sha256(str(self.now.seed).encode() + key).digest()
        with self._lock:
            self._asked += 1
        self.write("asked", asked=self._asked)
        return int.from_bytes(digest[:8], "big") / 2**64 < self.now.rate

    def told(self, count: int, **what: Any) -> None:
        """Book wrong acts that were really done."""
        if count:
            self.write("lie", count=count, **what)

    def write(self, event: str, **what: Any) -> None:
        """Append one line; it is in the kernel's hands on return."""
        setting = self.now
        line = {"event": event, "generation": setting.generation, "defect": setting.defect, **what}
        self._journal.write(json.dumps(line).encode() + b"\n")

    # Following ------------------------------------------------------------------------------------------------------
    def _generator(self) -> random.Random:
        return random.Random(self.now.seed)

    def _follow(self) -> None:
        stamp = 0
        while not self._stop.wait(POLL_S):
            try:
                new = self._control.stat().st_mtime_ns
                if new == stamp:
                    continue
                setting = Setting.of(json.loads(self._control.read_text()))
            except FileNotFoundError:
                continue
            stamp = new
            if setting.generation == self.now.generation:
                continue
            if setting.defect and setting.defect not in self._known:
                self.write("refused", wanted=setting.defect, wanted_generation=setting.generation)
                continue
            self._settle()
            with self._lock:
                self.now, self._random, self._asked = setting, random.Random(), 0
                self._random = self._generator()
            waiting, self.changed = self.changed, threading.Event()
            waiting.set()
            self.write("ack", pid=os.getpid())

    def close(self) -> None:
        """Stop following; for tests."""
        self._stop.set()
        self._thread.join()  # else it may yet write into the closed file
        self._journal.close()


# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """What the connectors of some engines did in one generation. Counts are of wrong acts, in the defect's own unit."""

    lies: int = 0
    occasions: int = 0
    saved_keys: set[str] = field(default_factory=set)
    """Keys under which something wrong was saved."""
    loaded_keys: set[str] = field(default_factory=set)

    @property
    def read(self) -> int:
        """Wrong acts that reached a request: lies told while loading, or saved lies that were then loaded."""
        return len(self.saved_keys & self.loaded_keys) if self.saved_keys else self.lies


class Remote:
    """The harness's side: sets the lie of one or more engines and reads what they did.

    directories: engine name -> its directory.
    """

    def __init__(self, directories: dict[str, Path]) -> None:
        self._directories = directories

    def set(self, setting: Setting, engines: Sequence[str] | None = None) -> None:
        """Write the control files: of ``engines`` this setting, of all others the truth under the same generation."""
        for name, directory in self._directories.items():
            lying = engines is None or name in engines
            chosen = setting if lying else Setting(generation=setting.generation)
            temporary = directory / f"{CONTROL_NAME}.new"
            temporary.write_text(json.dumps(asdict(chosen)))
            temporary.replace(directory / CONTROL_NAME)

    def acknowledged(self, generation: int) -> bool:
        """Every process of every engine acts by this generation. Raises ValueError where one refused it."""
        followed = []
        for name, directory in self._directories.items():
            for role in ROLES:
                events = read_journal(directory / f"lying-{role}.jsonl")
                for event in events:
                    if event["event"] == "refused" and event["wanted_generation"] == generation:
                        raise ValueError(f"{name}: the {role} knows no defect {event['wanted']!r}")
                acks = [e["generation"] for e in events if e["event"] == "ack"]
                followed.append(bool(acks) and acks[-1] == generation)
        return all(followed)

    def told(self, generation: int) -> Told:
        """What all engines did in a generation."""
        total = Told()
        for directory in self._directories.values():
            for role in ROLES:
                events = [e for e in read_journal(directory / f"lying-{role}.jsonl") if e["generation"] == generation]
                total.occasions += max((e["asked"] for e in events if e["event"] == "asked"), default=0)
                for event in events:
                    if event["event"] == "lie":
                        total.lies += event["count"]
                        total.saved_keys.update(event.get("saved_keys", ()))
                    elif event["event"] == "load":
                        total.loaded_keys.update(event["keys"])
        return total


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Events of one process, in order; a last line that is not yet whole is left out. [] where there is no journal."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]
