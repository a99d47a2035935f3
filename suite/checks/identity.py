"""Identity (family I): what one engine wrote is read by no engine that computes something else.

A *pair* is a saver and a reader that differ in one thing. The reader's request for the saver's prompt is its *foreign*
request. What it must equal is the reader's own answer, known from requests under a salt that nobody else uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from reports import records as r
from suite.checks import answers
from suite.checks.base import EXTERNAL, EXTERNAL_HITS, LOCAL, STORE_GET, STORE_STATUSES, finding, store_ops, too_few
from suite.checks.comparison import Difference, compare


@dataclass(frozen=True)
class Reuse:
    """What a foreign request took from elsewhere, by every source that could tell. Tokens; ``loads`` are operations.

    Any source is enough: "nothing was reused" needs the agreement of all of them.
    """

    response_tokens: int
    local_tokens: int
    external_tokens: int
    hit_tokens: int
    loads_ok: int
    loads_failed: int
    loaded_bytes: int

    @property
    def tokens(self) -> int:
        """Most tokens that any source claims."""
        return max(self.response_tokens, self.local_tokens + self.external_tokens, self.hit_tokens)

    @property
    def any(self) -> bool:
        """Something was found under one of the reader's keys, whether or not it could be loaded."""
        return bool(self.tokens or self.loads_ok or self.loads_failed or self.loaded_bytes)

    def __str__(self) -> str:
        text = f"{self.tokens} tokens ({self.external_tokens} external, {self.local_tokens} local)"
        if self.loaded_bytes or self.loads_ok:
            text += f", {self.loaded_bytes} bytes in {self.loads_ok} loads"
        return text + (f", {self.loads_failed} failed loads" if self.loads_failed else "")


def reuse_of(o: r.Observation, delta: Mapping[str, float], *, counts_loads: bool = True) -> Reuse:
    """KeyError where the counters do not speak (``suite.checks.base.counter``): absent is unknown, never zero.

    counts_loads: the engine's connector counts what it reads; where it does not (LMCache), response, sources and hits alone speak.
    """

    def count(name: str) -> int:
        return int(delta[name])

    def store(status: str, quantity: str) -> int:
        return int(delta.get(f"store.{STORE_GET}.{status}.{quantity}", 0.0))

    if counts_loads and not any(name.startswith("store.") for name in delta):
        raise KeyError("no store counters in this delta: the engine reports none")
    return Reuse(
        response_tokens=o.cached_tokens or 0,
        local_tokens=count(LOCAL),
        external_tokens=count(EXTERNAL),
        hit_tokens=count(EXTERNAL_HITS),
        loads_ok=store("ok", "ops"),
        loads_failed=int(sum(store_ops(delta, STORE_GET, but_ok=True).values())),
        loaded_bytes=sum(store(status, "bytes") for status in STORE_STATUSES),
    )


@dataclass(frozen=True)
class PairRule:
    """What a pair promises. ``changes_answers``: the setting changes what the model answers, so a case in which both sides
    answer alike has proven nothing. ``must_isolate``: no reuse is right, however equal the answers (a salt's promise)."""

    changes_answers: bool
    must_isolate: bool


@dataclass(frozen=True)
class PairAnswers:
    """The requests of one pair. All answer one prompt. ``cold`` and ``native`` are the reader's own; both have two at
    least, so that its noise is known. ``own`` is the reader's own answer over its own blocks from the pool: it must equal the
    native one, or the reader cannot be trusted to read anything. Where one of its loads failed (``own_recomputed``) it has
    the shape of neither, and only the cold arm can say whether it is right; that it failed is for other checks to find."""

    tag: str
    saver_name: str
    reader_name: str
    foreign: r.Observation
    reuse: Reuse
    cold: Sequence[r.Observation]
    native: Sequence[r.Observation]
    own: r.Observation
    saver_native: r.Observation
    own_recomputed: bool = False


@dataclass(frozen=True)
class ColdArm:
    """How far a computed answer may be from another computed one, between the honest noise and the least damage that reuse of
    foreign blocks does. ``blind``: says so where such damage is not to be told from the noise; ``limit`` is then what no noise
    explains, so that what is beyond it is wrong all the same."""

    limit: answers.Floor
    blind: Sequence[r.Finding] = ()

    def judge(self, got: r.Observation, own: r.Observation) -> tuple[bool, list[r.Finding]]:
        """Whether an answer is wrong; and the findings on it: of a wrong answer, else of the blindness."""
        found = answers.judge_cold([(got, own)], self.limit).findings
        wrong = any(f.code is r.FindingCode.WRONG_ANSWER for f in found)
        return wrong, found if wrong else [*found, *self.blind]


class ColdArms(Protocol):
    """Makes the cold arm of a pair (``suite.gates.oracle``)."""

    def __call__(self, own: answers.Floor, *, same_shape: bool, apart_nat: float | None) -> ColdArm:
        """own: noise of cold answers to one prompt. same_shape: both answers were computed in chunks of equal length, so
        that its own noise is all there is. apart_nat: how far saver and reader are apart by themselves, where that is a
        difference at all: hidden reuse moves the answer by about as much."""
        ...


@dataclass(frozen=True)
class PairJudgement:
    """Findings on a pair, notes, and the numbers a person wants to see."""

    findings: list[r.Finding]
    notes: list[str]
    numbers: dict[str, object]


def judge_pair(
    pair: PairAnswers,
    rule: PairRule,
    *,
    minimum_nat: float,
    native_noise: answers.Floor,
    cold_noise: answers.Floor,
    cold_arm: ColdArms,
) -> PairJudgement:
    """Was anything reused across, and was the reader's answer its own?

    minimum_nat: a difference of at least this much (or other tokens) is a wrong answer; below it, reuse across is named as
    what it is.
    native_noise: of the stack's own engines, in this run; it widens the reader's own, which rests on few samples.
    cold_noise: of the cold answers of all pairs of the case; few samples of one pair say little: kernels of adapters on a GPU give
    one prompt answers that are up to 0.09 nat apart, and equal ones in between.
    """
    native_floor = answers.native_floor([(pair.native[0], o) for o in pair.native[1:]])
    if not native_floor.pairs or not cold_noise.pairs:
        why = native_floor.first_problem or cold_noise.first_problem or "one answer of a kind"
        return PairJudgement(too_few(f"{pair.tag}: the reader's own noise is not known: {why}"), [], {})
    native_floor = native_floor.merged(native_noise)
    apart = compare(pair.saver_native, pair.native[0])
    differs = rule.changes_answers and not apart.problem
    alike = apart.max_nat <= native_floor.max_nat and not apart.parted
    kernels = None if alike or apart.problem else _other_kernels(pair, rule, cold_noise, cold_arm)
    open_: list[r.Finding] = []
    if _has_native_shape(pair) and kernels:
        reference, limit = pair.native[0], kernels.limit
        wrong, of_arm = kernels.judge(pair.foreign, reference)
        open_ = [] if wrong else of_arm
    elif _has_native_shape(pair):
        reference, limit = pair.native[0], native_floor
        wrong = bool(answers.judge_external_vs_native([(pair.foreign, reference)], limit))
    else:
        arm = cold_arm(cold_noise, same_shape=not pair.reuse.any, apart_nat=apart.max_nat if differs else None)
        reference, limit = pair.cold[0], arm.limit
        wrong, of_arm = arm.judge(pair.foreign, reference)
        open_ = [] if wrong else of_arm
    got = compare(pair.foreign, reference)
    numbers: dict[str, object] = {
        "prompt_tokens": len(pair.foreign.prompt_token_ids),
        "reused_tokens": pair.reuse.tokens,
        "reuse": str(pair.reuse),
        "answer_differs_nat": got.max_nat,
        "limit_nat": limit.max_nat,
        "native_floor_nat": native_floor.max_nat,
        "own_cold_floor_nat": cold_noise.max_nat,
        "saver_and_reader_differ_nat": apart.max_nat,
    }
    evidence = {
        "saver": pair.saver_name,
        "reader": pair.reader_name,
        "expected_tokens": list(reference.output_token_ids),
        "got_tokens": list(pair.foreign.output_token_ids),
        "reference": reference.request_id,
        "first_request": pair.foreign.request_id,
        **numbers,
        **got.evidence(),
    }
    findings = _own(pair, native_floor, cold_arm(cold_noise, same_shape=False, apart_nat=None))
    said = {f.code for f in findings}
    findings = [*(f for f in open_ if f.code not in said), *findings]  # blindness is said once a pair
    notes: list[str] = []
    if apart.problem or got.problem:
        found = too_few(f"{pair.tag}: answers cannot be compared: {apart.problem or got.problem}")
        return PairJudgement([_corrupt(pair, got, evidence)] if got.corrupt else found, [], numbers)
    if rule.changes_answers and alike:
        message = (
            f"{pair.tag}: {pair.saver_name} and {pair.reader_name} answer alike without any reuse:"
            " the setting had no effect, and nothing is proven"
        )
        findings.append(finding(r.FindingCode.NO_PRESSURE, message, **numbers))
    if wrong:
        findings.append(_wrong(pair, got, limit.max_nat, minimum_nat, evidence))
    elif pair.reuse.any:
        verdict = _unproven(pair, rule, alike=alike or kernels is not None)
        if verdict:
            findings.append(finding(r.FindingCode.FOREIGN_REUSE, verdict, **evidence))
        else:
            notes.append(
                f"{pair.tag}: {pair.reuse} were reused across, and rightly: both compute the same"
                f" (their own answers differ by {apart.max_nat:.3g} nat, the one over the other's blocks by"
                f" {got.max_nat:.3g}, limit {limit.max_nat:.3g})"
            )
    elif not open_ and got.max_nat > cold_noise.max_nat:
        notes.append(
            f"{pair.tag}: nothing was reused, and {pair.reader_name}'s answer is {got.max_nat:.3g} nat from its own cold one,"
            f" where such answers are up to {cold_noise.max_nat:.3g} apart: its kernels do not repeat themselves"
            f" (limit {limit.max_nat:.3g})"
        )
    return PairJudgement(findings, notes, numbers)


def _other_kernels(pair: PairAnswers, rule: PairRule, cold_noise: answers.Floor, cold_arms: ColdArms) -> ColdArm | None:
    """Two that compute one function with unlike kernels (attention backends) round unlike, and so do answers over each other's
    blocks: they are judged as computed answers of unequal shape are. On an H200 Triton's kernels and FlashAttention's are 0.11 to
    0.19 nat apart by themselves, their answers over each other's blocks 0.10 to 0.11, where a wrong block moves one by 0.74 and
    more. None where the two are farther apart than such noise: they do not compute the same then, whatever the setting says."""
    if rule.changes_answers or rule.must_isolate:
        return None
    arm = cold_arms(cold_noise, same_shape=False, apart_nat=None)
    return None if arm.judge(pair.saver_native, pair.native[0])[0] else arm


def _own(pair: PairAnswers, native_floor: answers.Floor, arm: ColdArm) -> list[r.Finding]:
    if not pair.own_recomputed:
        return answers.judge_external_vs_native([(pair.own, pair.native[0])], native_floor)
    return arm.judge(pair.own, pair.cold[0])[1]


def _has_native_shape(pair: PairAnswers) -> bool:
    """The foreign answer was computed in chunks of the same shape as the reader's native one, over blocks that it read."""
    return pair.reuse.any and not pair.reuse.loads_failed and pair.foreign.cached_tokens == pair.native[0].cached_tokens


def _unproven(pair: PairAnswers, rule: PairRule, *, alike: bool) -> str:
    """Why reuse across is a failure although the answer was right; "" where it is provably harmless."""
    if pair.reuse.loads_failed:
        return (
            f"{pair.tag}: {pair.reader_name} found {pair.saver_name}'s blocks under its own keys; the load failed and the"
            f" prompt was recomputed ({pair.reuse})"
        )
    if rule.must_isolate:
        return f"{pair.tag}: {pair.reader_name} read {pair.saver_name}'s blocks, which it may not see: {pair.reuse}"
    if not alike:
        return (
            f"{pair.tag}: {pair.reader_name} read {pair.saver_name}'s blocks ({pair.reuse}), and the two do not compute"
            " the same; that this answer came out right proves nothing for the next"
        )
    return ""


def _wrong(
    pair: PairAnswers, got: Difference, limit: float, minimum_nat: float, evidence: dict[str, object]
) -> r.Finding:
    if pair.reuse.any:
        text = f"{pair.tag}: {pair.reader_name} read {pair.saver_name}'s blocks ({pair.reuse}); its answer differs from its own"
    else:
        text = f"{pair.tag}: {pair.reader_name} reports no reuse, yet its answer differs from its own cold one"
    message = f"{text} by {got.max_nat:.3g} nat (at most {limit:.3g})" + (
        f", tokens part at step {got.first_step} ({got.a_token} against {got.b_token})" if got.parted else ""
    )
    grave = got.parted or got.max_nat >= minimum_nat or not pair.reuse.any
    return finding(r.FindingCode.WRONG_ANSWER if grave else r.FindingCode.FOREIGN_REUSE, message, **evidence)


def _corrupt(pair: PairAnswers, got: Difference, evidence: dict[str, object]) -> r.Finding:
    message = f"{pair.tag}: {pair.reader_name} read {pair.saver_name}'s blocks ({pair.reuse}): {got.problem}"
    return finding(r.FindingCode.WRONG_ANSWER, message, **evidence)


LMCACHE_KEY = re.compile(r"(?P<front>.+@\d+@\d+)@(?P<hash>-?[0-9a-f]+)@(?P<rest>[a-z0-9_]+(@.+)?)\Z")
"""``MODEL@WORLD_SIZE@RANK@HASH@DTYPE``, and tags behind it (LMCache 0.5.3, ``lmcache/utils.py``)."""


def key_prefix(key: str) -> str:
    """What stands around the block hash in a key of the tested release (``...@group:0@<hash>``), or in one of LMCache's."""
    if found := LMCACHE_KEY.match(key):
        return f"{found['front']}@{found['rest']}"
    return key.rpartition("@")[0]


def key_hash(key: str) -> str:
    """The block hash of a key."""
    if found := LMCACHE_KEY.match(key):
        return found["hash"]
    return key.rpartition("@")[2]


def told_apart_by(saver_keys: Sequence[str], reader_keys: Sequence[str]) -> str:
    """Which part of the keys kept two engines apart, as the store's own listing shows it after both had saved one prompt.

    ``prefix``, ``hash``, ``prefix and hash``; ``nothing`` where the reader wrote no key of its own.
    """
    if not reader_keys:
        return "nothing"
    by_prefix = not {key_prefix(k) for k in saver_keys} & {key_prefix(k) for k in reader_keys}
    by_hash = not {key_hash(k) for k in saver_keys} & {key_hash(k) for k in reader_keys}
    parts = [name for name, differs in (("prefix", by_prefix), ("hash", by_hash)) if differs]
    return " and ".join(parts) or "nothing"
