"""What gates of family I send: one prompt, saved by one party and asked for by another that must not read it.

========== ====== ================================================= =====================================================
role       party  prefix comes from                                 what it is for
========== ====== ================================================= =====================================================
cold       reader nowhere (a salt of its own), four times           its own answer, and the noise of such answers
native     reader its own cache, twice                              the same, in the shape of a hit
save       saver  nowhere; now the prompt is in the pool            what could be read across
saver      saver  its own cache                                     do both compute the same at all?
foreign    reader must be nowhere                                   the claim
control    saver  the pool, after a local reset                     the saver's blocks are there, and can be read
control    equal  the pool                                          an equal engine does read them
own        reader the pool, after a local reset, under its salt     the reader does read from this pool, and rightly
========== ====== ================================================= =====================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from suite.gates.arms import settle_saves
from suite.workload.prompts import Prompt

if TYPE_CHECKING:
    from fixtures.stack import Stack

PROMPT_TOKENS = 1000
"""One prefill chunk, so that cold, native and external answers of one engine agree to the last digit; 31 blocks of 32."""


COLD_SAMPLES = 4
"""Six differences a pair. Kernels of adapters on a GPU gave two equal cold answers in every second case, and 0.09 nat in others."""


@dataclass(frozen=True)
class Party:
    """Who asks: an engine, an adapter ("" for the base model), a salt. ``text`` says what makes it another one."""

    engine: str
    text: str
    adapter: str = ""
    salt: str | None = None

    def fields(self, salt: str | None = None) -> dict[str, Any]:
        """Keyword arguments of a request; ``salt`` in place of its own, which alone has to keep it apart (I.salt judges that)."""
        found: dict[str, Any] = {"cache_salt": salt or self.salt, "salt_alone": salt is None}
        if self.adapter:
            found["extra"] = {"model": self.adapter}
        return found

    @property
    def name(self) -> str:
        """As shown in messages."""
        return f"{self.engine} ({self.text})"


@dataclass(frozen=True)
class Pair:
    """A direction of a case: what ``saver`` wrote, ``reader`` must not read. ``equal``: a party for which it is right."""

    tag: str
    saver: Party
    reader: Party
    equal: Party | None = None


def ask_pair(stack: Stack, case_id: str, pair: Pair) -> None:
    """Send all requests of a pair, and record which keys each side wrote (fact ``identity.pair``)."""
    tag, saver, reader = pair.tag, pair.saver, pair.reader
    prompt = stack.prompts(case_id).fresh(tag, PROMPT_TOKENS)
    salts = _ask_references(stack, case_id, tag, reader, prompt)
    before = stack.keys()
    with stack.phase(case_id, f"save/{tag}"):
        _ask_saver(stack, tag, saver, prompt)
    saved = stack.keys() - before
    wrote = _ask_foreign(stack, case_id, tag, reader, prompt)
    with stack.phase(case_id, f"controls/{tag}"):
        _ask_control(stack, tag, saver, prompt)
        if pair.equal is not None:
            _ask_control(stack, tag, pair.equal, prompt)
        _ask_own(stack, tag, reader, prompt, salts[0])
    _record(stack, pair, saved, wrote)


def ask_before_and_after(stack: Stack, case_id: str, pair: Pair, change: Callable[[], None]) -> None:
    """A pair whose two sides are one engine before and after ``change``. The saver's control comes before it, and the
    reader's own answers after; the foreign request finds the engine's own cache as the change left it."""
    tag, saver, reader = pair.tag, pair.saver, pair.reader
    prompt = stack.prompts(case_id).fresh(tag, PROMPT_TOKENS)
    settle_saves(stack)
    before = stack.keys()
    with stack.phase(case_id, f"save/{tag}"):
        _ask_saver(stack, tag, saver, prompt)
        _ask_control(stack, tag, saver, prompt)
    saved = stack.keys() - before
    with stack.phase(case_id, f"change/{tag}"):
        change()
    salts = _ask_references(stack, case_id, tag, reader, prompt)
    wrote = _ask_foreign(stack, case_id, tag, reader, prompt)
    with stack.phase(case_id, f"controls/{tag}"):
        _ask_own(stack, tag, reader, prompt, salts[0])
    _record(stack, pair, saved, wrote)


def _ask_references(stack: Stack, case_id: str, tag: str, reader: Party, prompt: Prompt) -> list[str]:
    """The reader's own answers, under salts that nobody else uses; returns the salts."""
    salts = [f"{case_id}.{tag}.own.{i}" for i in range(1, COLD_SAMPLES + 1)]
    with stack.phase(case_id, f"reference/{tag}"):
        for salt in salts:
            stack.save(reader.engine, prompt, role=f"cold/{tag}", **reader.fields(salt))
        for _ in range(2):
            stack.ask_measured(reader.engine, prompt, f"native/{tag}", **reader.fields(salts[0]))
    settle_saves(stack)
    return salts


def _ask_saver(stack: Stack, tag: str, saver: Party, prompt: Prompt) -> None:
    stack.save(saver.engine, prompt, role=f"save/{tag}", **saver.fields())
    stack.ask_measured(saver.engine, prompt, f"saver/{tag}", **saver.fields())


def _ask_foreign(stack: Stack, case_id: str, tag: str, reader: Party, prompt: Prompt) -> frozenset[str]:
    """The reader asks for what the saver saved; returns the keys that the reader wrote."""
    before = stack.keys()
    with stack.phase(case_id, f"foreign/{tag}"):
        stack.ask_measured(reader.engine, prompt, f"foreign/{tag}", **reader.fields())
    settle_saves(stack)
    return stack.keys() - before


def _ask_control(stack: Stack, tag: str, party: Party, prompt: Prompt) -> None:
    stack.reset_local_cache(party.engine)
    stack.ask_measured(party.engine, prompt, f"control/{tag}", **party.fields())


def _ask_own(stack: Stack, tag: str, reader: Party, prompt: Prompt, salt: str) -> None:
    stack.reset_local_cache(reader.engine)
    stack.ask_measured(reader.engine, prompt, f"own/{tag}", **reader.fields(salt))


def _record(stack: Stack, pair: Pair, saved: frozenset[str], wrote: frozenset[str]) -> None:
    stack.fact(
        "identity.pair",
        {
            "tag": pair.tag,
            "saver": pair.saver.name,
            "reader": pair.reader.name,
            "equal": pair.equal.name if pair.equal else "",
            "saver_engine": pair.saver.engine,
            "reader_engine": pair.reader.engine,
            "saver_keys": sorted(saved),
            "reader_keys": sorted(wrote),
        },
    )
