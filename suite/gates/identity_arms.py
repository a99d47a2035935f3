"""What gates of family I send: one prompt, saved by one party and asked for by another that must not read it.

========== ====== ================================================= =====================================================
role       party  prefix comes from                                 what it is for
========== ====== ================================================= =====================================================
cold       reader nowhere (a salt of its own), twice                its own answer, and the noise of such answers
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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from suite.gates.arms import settle_saves

if TYPE_CHECKING:
    from fixtures.stack import Stack

PROMPT_TOKENS = 1000
"""One prefill chunk, so that cold, native and external answers of one engine agree to the last digit; 31 blocks of 32."""


@dataclass(frozen=True)
class Party:
    """Who asks: an engine, an adapter ("" for the base model), a salt. ``text`` says what makes it another one."""

    engine: str
    text: str
    adapter: str = ""
    salt: str | None = None

    def fields(self, salt: str | None = None) -> dict[str, Any]:
        """Keyword arguments of a request; ``salt`` in place of its own."""
        found: dict[str, Any] = {"cache_salt": salt or self.salt}
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
    block = stack.engines[saver.engine].facts.block_tokens
    prompt = stack.prompts(case_id).fresh(tag, PROMPT_TOKENS)
    salts = [f"{case_id}.{tag}.own.{i}" for i in (1, 2)]
    with stack.phase(case_id, f"reference/{tag}"):
        for salt in salts:
            stack.save(reader.engine, prompt, role=f"cold/{tag}", **reader.fields(salt))
        for _ in range(2):
            stack.ask_measured(reader.engine, prompt, f"native/{tag}", **reader.fields(salts[0]))
    settle_saves(stack)
    before = stack.keys()
    with stack.phase(case_id, f"save/{tag}"):
        stack.save(saver.engine, prompt, role=f"save/{tag}", **saver.fields())
        stack.ask_measured(saver.engine, prompt, f"saver/{tag}", **saver.fields())
    saved = stack.keys()
    with stack.phase(case_id, f"foreign/{tag}"):
        stack.ask_measured(reader.engine, prompt, f"foreign/{tag}", **reader.fields())
    settle_saves(stack)
    wrote = stack.keys() - saved
    with stack.phase(case_id, f"controls/{tag}"):
        stack.reset_local_cache(saver.engine)
        stack.ask_measured(saver.engine, prompt, f"control/{tag}", **saver.fields())
        if pair.equal is not None:
            stack.reset_local_cache(pair.equal.engine)
            stack.ask_measured(pair.equal.engine, prompt, f"control/{tag}", **pair.equal.fields())
        stack.reset_local_cache(reader.engine)
        stack.ask_measured(reader.engine, prompt, f"own/{tag}", **reader.fields(salts[0]))
    stack.fact(
        "identity.pair",
        {
            "tag": tag,
            "saver": saver.name,
            "reader": reader.name,
            "equal": pair.equal.name if pair.equal else "",
            "saver_engine": saver.engine,
            "reader_engine": reader.engine,
            "block_tokens": block,
            "saver_keys": sorted(saved - before),
            "reader_keys": sorted(wrote),
        },
    )
