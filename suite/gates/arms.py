"""What gates do to a stack again and again: the arms of a comparison, and the calibration of the oracle.

An *arm* is one request whose prompt tokens come from a known source. ``reuse_arms`` sends one prompt through four:

========== ====== =========================================================================================
role       engine source of the reusable tokens
========== ====== =========================================================================================
cold       saver  computed; afterwards the prompt is in the pool and in the saver's own cache
native     saver  the saver's own prefix cache
external   reader the pool, and nothing else: the reader never saw the prompt
native-2   reader the reader's own prefix cache, which the pool filled
reference  none   an engine of its own, without connector and prefix cache (``reference = "engine"`` in the spec)
========== ====== =========================================================================================

With ``reference = "salt"`` the cold arm is the reference: its prompt is fresh, so nothing can be reused, and the
counters must confirm it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fixtures.errors import Untestable
from reports import records as r
from suite.checks.kv_layers import blocks_of_window
from suite.workload.prompts import Prompt, PromptMaker

if TYPE_CHECKING:
    from fixtures.stack import Stack

REFERENCE = "reference"
"""Name of the reference engine (``fixtures.stack.REFERENCE``; not imported, so that judging needs no fixtures)."""

CALIBRATION = "calibration"
"""Case id of the records that measure the oracle itself; once a stack, shared by all its cases."""

NOT_PLANTED = "oracle.not-planted"
"""Name of the fact that says why no block of this (deployed) pool was damaged to test the oracle."""

CALIBRATION_LENGTHS = (65, 1000, 3000)
"""Prompt lengths (tokens) at which the noise floors are measured: three blocks, one prefill chunk, several chunks."""

CALIBRATION_REQUEST_S = 90.0
"""The deadline of calibration's requests, whatever that of a case is: a stall on a busy host (8 to 15 s were seen) must not
leave every case of the stack without an oracle. Time is not what calibration measures."""

PLANTED_PROMPT_TOKENS = 2000
"""Length of the prompt that gets a wrong block, as in the measurement that this suite was begun with."""

FULL_SHARE = 0.5
"""Part of the pool's memory that may be in use before a case (or a benchmark) saves what it needs. Beyond the master's watermark (0.9
of it) the master evicts: blocks that were just saved go, or are refused, and what waits for them waits in vain."""

PLANT_ATTEMPTS = 3
"""Prompts that may be spent on one planted block, until one was replaced *and* read: a save or a load that fails on a busy
host must not blind the oracle of a whole stack. What the block then does to the answer has no part in it."""


def reuse_arms(stack: Stack, case_id: str, prompt: Prompt, saver: str, reader: str, tag: str = "") -> bool:
    """Send ``prompt`` through the four arms, in the order of the table above. ``tag`` tells prompts of a case apart.

    Returns whether the external arm was answered. Where it was not, nothing more is sent to the reader: each further
    request would wait for its deadline too, and add nothing.
    """
    suffix = f"/{tag}" if tag else ""
    if REFERENCE in stack.engines:
        with stack.phase(case_id, f"reference{suffix}"):
            stack.ask(REFERENCE, prompt, f"reference{suffix}")
    with stack.phase(case_id, f"save{suffix}"):
        stack.save(saver, prompt, role=f"cold{suffix}")
    with stack.phase(case_id, f"native{suffix}"):
        stack.ask_measured(saver, prompt, role=f"native{suffix}")
    with stack.phase(case_id, f"external{suffix}"):
        answered = stack.ask_measured(reader, prompt, role=f"external{suffix}").ok
        if answered:
            stack.ask_measured(reader, prompt, role=f"native-2{suffix}")
        else:
            stack.dirty = True
    return answered


SHARE_TOKENS = 2000
"""The long prompt of ``share_and_boundary``: one prefill chunk, 62 blocks of 32 tokens."""


def share_and_boundary(stack: Stack, case_id: str) -> None:
    """One long prompt and lengths around a block boundary, from the first engine to the second."""
    saver, reader = stack.names[0], stack.names[1]
    block = stack.engines[saver].facts.block_tokens
    prompts = stack.prompts(case_id)
    for tag, tokens in {"long": SHARE_TOKENS, "k3-1": 3 * block - 1, "k3": 3 * block, "k3+1": 3 * block + 1}.items():
        if not reuse_arms(stack, case_id, prompts.fresh(tag, tokens), saver, reader, tag):
            return


def other_engine(stack: Stack, engine: str) -> str:
    """The engine after ``engine`` in the stack's order (the first one after the last)."""
    names = stack.names
    return names[(names.index(engine) + 1) % len(names)]


def calibrate(stack: Stack, *, planted: bool = True, concurrent: bool = True) -> None:
    """Measure the oracle on this stack, once: both noise floors, alone and under concurrency, and its sensitivity.

    planted False: for a pool too small to keep the planted blocks; the judge then asks ``oracle.check(planted=False)``.
    concurrent False: for a case whose requests are all alone on their engine. The floors under concurrency are then left to
    the first case that needs them: on a deep model they take as long as all the rest, and the sensitivity would be held
    against a noise that no verdict of such a case rests on.

    Roles written: ``floor-cold``, ``floor-native`` (sequential), ``floor-cold-concurrent``,
    ``floor-native-concurrent``, ``planted`` with its ``planted-reference``; facts ``planted-block``. Every engine takes
    part: the cold and native arms of all engines answer the same prompts, under salts of their own so that no engine
    reads another's blocks.
    """
    make_room(stack)
    with stack.deadline(CALIBRATION_REQUEST_S):
        if not stack.notes.get("calibrated"):
            stack.notes["calibrated"] = True
            _measure(stack, planted and _may_plant(stack), concurrent)
        elif concurrent and not stack.notes.get("calibrated-concurrent"):
            _measure_concurrent(stack)


def make_room(stack: Stack) -> None:
    """Empty the pool where more than ``FULL_SHARE`` of it is in use: all that lies there are prompts of cases that are over. A
    deployed pool is left alone: what lies there is somebody's."""
    if stack.store is not None and stack.spec.external is None and stack.pool_share() > FULL_SHARE:
        stack.store_tool([{"op": "remove", "keys": sorted(stack.keys())}])
        stack.fact("made-room", {"share_left": stack.pool_share()})


def _may_plant(stack: Stack) -> bool:
    """Blocks may be damaged. In a deployed pool they may not without leave: the contrast stands in, and a fact says so."""
    if stack.spec.external is None:
        return True
    try:
        stack.check_store_tool(writes=True)
    except Untestable as exc:
        stack.fact(NOT_PLANTED, {"why": exc.probe, "mend": exc.mend})
        return False
    return True


def _lengths(stack: Stack) -> tuple[int, list[int]]:
    """The longest prompt that every engine takes, and the lengths at which noise is measured."""
    longest = min(stack.engines[name].facts.max_model_len for name in stack.names) - 16
    return longest, [n for n in CALIBRATION_LENGTHS if n <= longest]


def _measure(stack: Stack, planted: bool, concurrent: bool) -> None:
    """Send what the oracle is measured by."""
    prompts = stack.prompts(CALIBRATION)
    longest, lengths = _lengths(stack)
    with stack.phase(CALIBRATION, "floors"):
        for tokens in lengths:
            prompt = prompts.fresh(f"floor/{tokens}", tokens)
            if REFERENCE in stack.engines:
                stack.ask(REFERENCE, prompt, "floor-cold")
            for engine in stack.names:
                salt = f"{CALIBRATION}.{engine}.{tokens}"
                stack.ask(engine, prompt, "floor-cold", cache_salt=salt)
                for _ in range(2):
                    stack.ask(engine, prompt, "floor-native", cache_salt=salt)
    if concurrent:
        _measure_concurrent(stack)
    with stack.phase(CALIBRATION, "contrast"):
        ask_contrasts(stack, prompts.fresh("contrast", min(PLANTED_PROMPT_TOKENS, longest)), prompts)
    if planted and stack.store is not None and len(stack.names) > 1:
        with stack.phase(CALIBRATION, "planted"):
            plant_wrong_blocks(stack, prompts.fresh("planted", planted_prompt_tokens(stack)), prompts)


def _measure_concurrent(stack: Stack) -> None:
    """The floors of requests that share batches with others."""
    stack.notes["calibrated-concurrent"] = True
    _, lengths = _lengths(stack)
    prompt = stack.prompts(CALIBRATION).fresh(f"floor/{lengths[-1]}", lengths[-1])
    with stack.phase(CALIBRATION, "floors-concurrent"):
        for engine in stack.names:
            salts = [f"{CALIBRATION}.concurrent.{engine}.{i}" for i in range(4)]
            for role in ("floor-cold-concurrent", "floor-native-concurrent"):
                stack.send_all([stack.request(engine, prompt, role, cache_salt=salt) for salt in salts], 4)


def positions(blocks: int, first: int = 0) -> dict[str, int]:
    """The blocks (by index) at which the oracle's sensitivity is measured. first: the first one that a hit reads."""
    return {"first": first, "middle": (first + blocks) // 2, "last": blocks - 1}


def planted_prompt_tokens(stack: Stack) -> int:
    """Of a model with recurrent states one token behind the last whole block: the state of a hit's end is seen best there, as
    some states (a short convolution's) are forgotten within a few tokens."""
    facts = stack.engines[stack.names[0]].facts
    if not any(layers.kind == "state" for layers in facts.kv_layers):
        return PLANTED_PROMPT_TOKENS
    return PLANTED_PROMPT_TOKENS // facts.block_tokens * facts.block_tokens + 1


def first_block_read(facts: r.EngineFacts, blocks: int) -> int:
    """Index of the first block of a hit that is read at all: 0 where any layer keeps all tokens, else the first one inside the
    widest window."""
    windows = [layers.window_tokens for layers in facts.kv_layers if layers.kind == "window"]
    if not windows or any(layers.kind == "full" for layers in facts.kv_layers):
        return 0
    return max(0, blocks - blocks_of_window(max(windows), facts.block_tokens))


def ask_contrasts(stack: Stack, prompt: Prompt, prompts: PromptMaker) -> None:
    """Cold answers to a prompt and to copies of it in which one whole block is another: the model sees every block."""
    engine = stack.names[0]
    block = stack.engines[engine].facts.block_tokens
    stack.ask(engine, prompt, "contrast-reference", cache_salt=f"{CALIBRATION}.contrast")
    for where, index in positions(len(prompt) // block).items():
        other = prompts.fresh(f"contrast/{where}", block)
        changed = prompt[: index * block] + other + prompt[(index + 1) * block :]
        stack.ask(engine, changed, f"contrast/{where}", cache_salt=f"{CALIBRATION}.contrast.{where}")


def settle_saves(stack: Stack) -> None:
    """Wait until saves of earlier requests are listed: whoever looks for new keys must not find theirs."""
    stack.wait_quiet("earlier saves to be listed")


def plant_wrong_blocks(stack: Stack, prompt: Prompt, prompts: PromptMaker) -> None:
    """Put one foreign block into the pool under a valid key, at the first, a middle and the last reusable position.

    Each time the reader has never seen the prompt; what it answers must differ from the reference, or the oracle is
    blind. A block's key is found without knowing how keys are made: save the prompt up to the block, then one block
    further, and see which key is new.
    """
    saver = stack.names[0]
    block = stack.engines[saver].facts.block_tokens
    blocks = stack.reusable(saver, prompt) // block
    places = positions(blocks, first_block_read(stack.engines[saver].facts, blocks))
    settle_saves(stack)
    foreign_keys_before = stack.keys()
    stack.save(saver, prompts.fresh("planted/foreign", block + 1), role="planted-foreign")
    foreign = sorted(stack.keys() - foreign_keys_before)
    for where, index in places.items():
        for attempt in range(PLANT_ATTEMPTS):
            victim = prompts.fresh(f"planted/{where}/{attempt}", len(prompt))
            if _plant_one(stack, victim, where, index, foreign):
                break


def _plant_one(stack: Stack, victim: Prompt, where: str, index: int, foreign: list[str]) -> bool:
    """Replace one block of a saved prompt and have it read. Whether it was replaced and read (not: whether it showed)."""
    saver, reader = stack.names[0], stack.names[1]
    block = stack.engines[saver].facts.block_tokens
    if index:
        stack.save(saver, victim[: index * block + 1], role="planted-prefix")
    before = stack.keys()
    stack.save(saver, victim[: (index + 1) * block + 1], role="planted-prefix")
    own = sorted(stack.keys() - before)
    stack.save(saver, victim, role="planted-prefix")
    stack.ask(saver, victim, "planted-reference")
    answer = replace_keys(stack, own, foreign)
    planted = stack.ask_measured(reader, victim, "planted")
    stack.fact(
        "planted-block",
        {"where": where, "block": index, "keys": own, "replaced": answer, "request_id": planted.request_id},
    )
    return planted_was_read(answer, planted)


def replace_keys(stack: Stack, own: list[str], foreign: list[str]) -> dict[str, Any] | None:
    """Replace every key of a block by the foreign block's of the same group; None where they are not one pair a group.

    A block has a key for each group of layers that keeps it. Returns the store tool's answer, of several keys one of them all:
    ``put`` is the first failure, ``before`` and ``after`` list what was there.
    """
    sources = {_group(key): key for key in foreign}
    if not own or len(sources) != len(foreign) or sorted(map(_group, own)) != sorted(sources):
        return None
    steps = [{"op": "replace", "key": key, "how": "copy", "source": sources[_group(key)]} for key in own]
    answers = stack.store_tool(steps)
    if len(answers) == 1:
        return dict(answers[0])
    return {
        "put": next((answer["put"] for answer in answers if answer["put"] != 0), 0),
        "before": [answer["before"] for answer in answers],
        "after": [answer["after"] for answer in answers],
    }


def _group(key: str) -> str:
    """A key without its block's hash: model, ranks, and the group of layers."""
    return key.rpartition("@")[0]


def planted_was_read(replaced: Mapping[str, Any] | None, answer: r.Observation) -> bool:
    """A block was provably replaced, and a request then read blocks: the precondition of a planted block, not its effect."""
    if not replaced or not answer.cached_tokens:
        return False
    return bool(replaced["put"] == 0 and replaced["before"] != replaced["after"])


def owned_by(stack: Stack, owner: str, save: Callable[[], r.Observation], label: str) -> None:
    """Save something and record where its blocks lie: a fact ``owners`` with the number of blocks a unit holds.

    Blocks are attributed by the address of the memory that holds them (the store's own replica list) and the unit
    whose process listens there (the kernel's socket list).
    """
    before = stack.keys()
    save()
    record_owners(stack, owner, stack.keys() - before, label)


def record_owners(stack: Stack, saver: str, keys: Iterable[str], label: str) -> None:
    """The fact ``owners`` of ``owned_by`` for keys that ``saver`` saved."""
    new = sorted(keys)
    (replicas,) = stack.store_tool([{"op": "owners", "keys": new}])
    sockets = stack.snapshot_sockets(label)
    counts: dict[str, int] = {}
    for endpoints in replicas.values():
        for endpoint in endpoints:
            unit = sockets.unit_at(endpoint) or f"unknown {endpoint}"
            counts[unit] = counts.get(unit, 0) + 1
    stack.fact("owners", {"label": label, "saver": saver, "blocks": len(new), "held_by": counts})
