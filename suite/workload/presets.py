"""Ready traffic. Round numbers of our own, not measurements: every one can be changed on the command line."""

from __future__ import annotations

from suite.workload.distributions import Arrivals, constant, parse
from suite.workload.sessions import SessionSpec, SharedPrompt, SystemPrompt


def chat() -> SessionSpec:
    """People in conversations: a system prompt of 500 to 1,500 tokens, a few turns, half a minute to think."""
    return SessionSpec(
        requests=1000,
        opening=SystemPrompt(tokens=parse("uniform:500,1500", "system")),
        sessions=Arrivals(rate_per_s=1),
        turns=parse("lognormal:4,0.8,max=40", "turns"),
        user=parse("lognormal:120,1.5,max=8000", "user"),
        output=parse("lognormal:250,0.9,max=2000", "output"),
        think_s=parse("lognormal:30,1,max=600", "think"),
    )


def agentic() -> SessionSpec:
    """Agents: long instructions, many turns, most of them a tool's output that comes back within a second or two."""
    return SessionSpec(
        requests=1000,
        opening=SystemPrompt(tokens=parse("uniform:4000,12000", "system")),
        sessions=Arrivals(rate_per_s=0.5, kind="gamma", cv=2),
        turns=parse("lognormal:15,0.8,max=100", "turns"),
        user=parse("lognormal:200,1,max=4000", "user"),
        tool=parse("lognormal:900,1.5,max=16000", "tool"),
        tool_share=0.85,
        output=parse("lognormal:150,1,max=2000", "output"),
        think_s=parse("lognormal:20,1,max=600", "think"),
        tool_s=parse("lognormal:1.5,1,max=60", "tool time"),
    )


def shared_prefix() -> SessionSpec:
    """Single requests of equal length, half of each shared: for sweeps over what is shared."""
    return SessionSpec(
        requests=1000,
        opening=SharedPrompt(prompt=constant(2048), share=0.5),
        sessions=Arrivals(rate_per_s=4),
        output=constant(64),
        groups=4,
        block_tokens=32,
    )


PRESETS = {"chat": chat, "agentic": agentic, "shared-prefix": shared_prefix}
