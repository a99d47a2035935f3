"""How sampled requests are judged: every choice and step in arms of equal shape, the first distribution against the cold one.

A sampled token depends on the seed and on the distribution. In arms of equal shape both are equal, so the tokens are too,
on an engine without noise (a floor of zero); elsewhere the distributions are compared, up to where the samples part.
Against the cold arm, a difference far below any floor may flip a sample: there only the distribution of the first step can
be compared, cut to the k most likely tokens (the server adds the sampled one, wherever it ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from reports import records as r
from reports.history import History
from suite.checks import answers, hits, liveness, logs
from suite.checks.base import COMPUTED, EXTERNAL, LOCAL, PROMPT, finding, run, too_few
from suite.checks.pool_model import Expected
from suite.contract import Gate
from suite.gates.judging import (
    delta_of,
    explanation,
    failed_loads,
    fallbacks,
    measured_checks,
    ordered,
    visible_findings,
)
from suite.gates.oracle import Oracle
from suite.gates.selections import measured
from suite.workload.prompts import reusable_tokens

ARMS = ("cold", "native", "external", "native-2")
CONTROL = "control"


def arm(history: History, role: str) -> r.Observation | None:
    """The request in a role, or None."""
    return next((o for o in history.observations() if o.role == role), None)


def choices_asked(o: r.Observation) -> int:
    """How many choices a request asked for."""
    return int(o.sampling.get("n") or 1)


def choices(o: r.Observation) -> Iterator[r.Observation]:
    """Every choice of an answer as an answer of its own."""
    yield msgspec.structs.replace(o, more_choices=())
    for number, choice in enumerate(o.more_choices, start=1):
        yield msgspec.structs.replace(
            o,
            request_id=f"{o.request_id}[{number}]",
            output_token_ids=choice.output_token_ids,
            top_logprobs=choice.top_logprobs,
            token_logprobs=choice.token_logprobs,
            finish_reason=choice.finish_reason,
            token_s=choice.token_s,
            text=choice.text,
            more_choices=(),
        )


def of_prompt(o: r.Observation) -> r.Observation:
    """An answer whose steps are the prompt's own tokens, each with the log probabilities the server gave for it."""
    return msgspec.structs.replace(
        o,
        request_id=f"{o.request_id}[prompt]",
        output_token_ids=o.prompt_token_ids[1:],
        top_logprobs=o.prompt_logprobs,
        token_logprobs=(),
        more_choices=(),
    )


def distributions(o: r.Observation, steps: int) -> r.Observation:
    """An answer cut to the distributions of its first steps: the k most likely tokens, the likeliest as the step's token."""
    k = int(o.sampling.get("top_logprobs", o.sampling.get("logprobs")) or 1)
    tops = tuple(top[:k] for top in o.top_logprobs[:steps])
    return msgspec.structs.replace(
        o,
        output_token_ids=tuple(top[0][0] for top in tops),
        top_logprobs=tops,
        token_logprobs=(),
        token_s=o.token_s[: len(tops)],
        more_choices=(),
    )


def first_step(o: r.Observation) -> r.Observation:
    """An answer cut to the distribution of its first step."""
    return distributions(o, 1)


def comparable(pair: answers.Pair, floor_nat: float) -> answers.Pair:
    """The pair as it is; of sampled answers on an engine with noise, the distributions up to where the samples part.

    Where native answers differ at all, the least of such differences may flip a sample, and says nothing about reuse.
    """
    a, b = pair
    if not floor_nat or not a.sampling.get("temperature"):
        return pair
    tokens = zip(a.output_token_ids, b.output_token_ids, strict=False)
    same = next((i for i, (x, y) in enumerate(tokens) if x != y), len(a.output_token_ids))
    return distributions(a, same + 1), distributions(b, same + 1)


def pairs_of(a: r.Observation, b: r.Observation) -> list[answers.Pair]:
    """All that two answers in arms of equal shape must have in common."""
    pairs = list(zip(choices(a), choices(b), strict=True))
    if a.prompt_logprobs or b.prompt_logprobs:
        pairs.append((of_prompt(a), of_prompt(b)))
    return pairs


def check_answers(history: History, oracle: Oracle) -> list[r.Finding]:
    """External and the reader's own cache against native, strictly; native and external against the cold first step."""
    native, cold = arm(history, "native"), arm(history, "cold")
    strict: list[answers.Pair] = []
    loose: list[answers.Pair] = []
    for role in ("external", "native-2", "native"):
        o = arm(history, role)
        if o is None or not o.ok:
            continue
        if native is not None and native.ok and o is not native:
            same = o.cached_tokens == native.cached_tokens and not failed_loads(history, o)
            strict += pairs_of(o, native) if same else []
        if cold is not None and cold.ok:
            loose.append((first_step(o), first_step(cold)))
    strict = [comparable(pair, oracle.native.max_nat) for pair in strict]
    found = answers.judge_external_vs_native(strict, oracle.native)
    return found + answers.judge_cold(loose, oracle.cold_limit, min_pairs=2).findings


def wanted(history: History, o: r.Observation) -> Expected:
    """What each choice of a request must get, by its role; log probabilities of a prompt are computed, never reused."""
    block, tokens = history.engine(o.engine).block_tokens, len(o.prompt_token_ids)
    whole = 0 if o.sampling.get("prompt_logprobs") is not None else reusable_tokens(tokens, block)
    local = whole if o.role in ("native", "native-2") else 0
    external = whole if o.role in ("external", CONTROL) else 0
    return Expected(local, external, tokens, block, local + external)


def check_hits(history: History) -> list[r.Finding]:
    """Exact hits of every arm; of a request with several choices, the sum over them."""
    found: list[r.Finding] = []
    for role in (*ARMS, CONTROL):
        o = arm(history, role)
        if o is None or not o.ok:
            continue
        delta, expected = delta_of(history, o), wanted(history, o)
        if choices_asked(o) == 1:
            found += hits.check_hits(o, delta, expected)
        else:
            found += check_several(o, delta, expected)
    return found


def check_several(o: r.Observation, delta: dict[str, float] | None, expected: Expected) -> list[r.Finding]:
    """n choices are n prompts to the engine: their sources add up to n prompts, and what is reused is reused n times.

    Which choice loads and which finds the block already there is a race, so local and external are judged together; of
    a cold request later choices may find what the first one computed.
    """
    if delta is None:
        return too_few(f"no counters around request {o.request_id}")
    n, prompt = choices_asked(o), len(o.prompt_token_ids)
    parts = delta[LOCAL] + delta[EXTERNAL] + delta[COMPUTED]
    if not parts == delta[PROMPT] == n * prompt:
        text = f"{n} choices of {prompt} prompt tokens: {delta[PROMPT]:g} counted, {parts:g} over all sources"
        return [finding(r.FindingCode.CONSERVATION, text, request_id=o.request_id)]
    reused = delta[LOCAL] + delta[EXTERNAL]
    whole = n * expected.cached_tokens
    if o.role == "cold":
        if not delta[EXTERNAL]:
            return []
        text = f"a cold request of {n} choices got {delta[EXTERNAL]:g} external tokens"
        return [finding(r.FindingCode.EXTRA_HITS, text, request_id=o.request_id)]
    if expected.external_tokens and delta[EXTERNAL] < expected.external_tokens:
        text = f"{delta[EXTERNAL]:g} external tokens over {n} choices, at least {expected.external_tokens} expected"
        code = r.FindingCode.FEWER_HITS if delta[EXTERNAL] else r.FindingCode.ZERO_HITS
        return [finding(code, text, request_id=o.request_id)]
    if reused == whole:
        return []
    code = r.FindingCode.EXTRA_HITS if reused > whole else r.FindingCode.FEWER_HITS
    text = f"{reused:g} tokens reused over {n} choices, {whole} expected"
    return [finding(code, text, request_id=o.request_id, local=delta[LOCAL], external=delta[EXTERNAL])]


def check_asked(history: History) -> list[r.Finding]:
    """The options did what they are for: as many choices, prompt log probabilities and prompt tokens as were asked for."""
    external = arm(history, "external")
    if external is None:
        return too_few("nobody asked the reader: there is no external answer")
    if not external.ok:
        return []  # liveness says so
    got = 1 + len(external.more_choices)
    if got != choices_asked(external) or (
        external.sampling.get("prompt_logprobs") is not None and not external.prompt_logprobs
    ):
        return too_few(f"{got} choices and {len(external.prompt_logprobs)} prompt log probabilities came back")
    if len(external.prompt_token_ids) < 2 * history.engine(external.engine).block_tokens:
        return too_few(f"the prompt has {len(external.prompt_token_ids)} tokens: too short to be reused")
    return []


def check_control(history: History) -> list[r.Finding]:
    """The prompt was in the pool all the time: a plain request reads it in full."""
    o = arm(history, CONTROL)
    if o is not None and o.ok and o.cached_tokens and (delta_of(history, o) or {}).get(EXTERNAL, 0):
        return []
    return [finding(r.FindingCode.NO_CONTROL, "a plain request did not read the prompt from the pool")]


def judge_sampled(gate: Gate, history: History) -> r.Verdict:
    """Judge one set of request options."""
    oracle = Oracle.of(history)
    observed = history.observations()
    counted = measured(history)
    single = [o for o in counted if choices_asked(o) == 1 and o.role != "template"]
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "liveness": lambda: liveness.check_liveness(observed),
        "clock": lambda: liveness.check_clock(observed),
        "oracle": oracle.check,
        "same function": oracle.check_same_function,
        "asked": lambda: check_asked(history),
        "answers": lambda: check_answers(history, oracle),
        "hits": lambda: check_hits(history),
        "control": lambda: check_control(history),
        **measured_checks(history, single),
        "fallbacks": lambda: fallbacks(history, counted),
        "visible": lambda: visible_findings(history),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered(run(checks))
    told = {role: o.cached_tokens for role in (*ARMS, CONTROL) if (o := arm(history, role)) is not None}
    return gate.judged(
        history,
        findings,
        good=f"equal answers in all arms; cached tokens {told}",
        wanted="external and native answers equal within the native floor, token by token; exact hits",
        numbers={**oracle.numbers(), "cached_tokens": told},
        notes=_parted(history),
        **explanation(history, findings),
    )


def _parted(history: History) -> tuple[str, ...]:
    """Where the sampled tokens of cold and native part although nothing external took part: numerics, worth knowing."""
    cold, native = arm(history, "cold"), arm(history, "native")
    if cold is None or native is None or cold.output_token_ids == native.output_token_ids:
        return ()
    return ("the cold and the native answer sampled other tokens: their shapes differ, no pool took part",)
