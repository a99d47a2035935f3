"""Two engines and a master in three containers: they share, are parted, and share again once they are not.

What an engine answers *for the other's blocks* while it cannot reach it is the gates' business (family D); here it has to
serve everything else, or the partition would be wider than it says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fixtures.errors import Untestable
from fixtures.faults.docker import Partition
from fixtures.healthy import prove_healthy
from fixtures.pytest_support.run import WorkerRun
from fixtures.runtimes.docker_audit import audit
from fixtures.runtimes.docker_unit import ContainerUnit
from fixtures.stack import Stack

pytestmark = [pytest.mark.docker, pytest.mark.needs("docker-image", "nft")]

CASE = "docker-smoke"
PROMPT_TOKENS = 1000
OTHER_TOKENS = 200


@pytest.fixture
def stack(kvgates_run: WorkerRun) -> Iterator[Stack]:
    """The run's own stack, which the gates after this use too: proven well at the end, or built again."""
    if kvgates_run.spec.runtime != "docker":
        raise Untestable(
            "docker-runtime", f"this run's runtime is {kvgates_run.spec.runtime!r}", "give --runtime docker"
        )
    running = kvgates_run.pool.acquire(kvgates_run.spec)
    assert isinstance(running, Stack)
    yield running
    assert prove_healthy(running, CASE) == []


def external_tokens(stack: Stack, label: str) -> tuple[int, int]:
    """Save a fresh prompt on one engine, ask the other: (tokens that came from the pool, tokens that could)."""
    owner, reader = stack.names
    prompt = stack.prompts(CASE).fresh(label, PROMPT_TOKENS)
    saved = stack.save(owner, prompt)
    before = stack.scrape(reader, f"{label}:before").values["external_hits_tokens"]
    answer = stack.ask_measured(reader, prompt, "external", max_tokens=8)
    after = stack.scrape(reader, f"{label}:after").values["external_hits_tokens"]
    assert saved.ok, saved.error
    assert answer.ok, answer.error
    assert answer.output_token_ids == saved.output_token_ids
    return int(after - before), stack.reusable(reader, prompt)


def test_every_unit_is_a_container_that_may_do_no_more_than_it_has_to(stack: Stack) -> None:
    assert all(isinstance(unit, ContainerUnit) for unit in stack.units().values())
    assert audit(stack.units()) == []


def test_share_partition_heal(stack: Stack) -> None:
    owner, reader = stack.names
    with stack.phase(CASE, "before"):
        got, wanted = external_tokens(stack, "before")
        assert got == wanted > 0
    partition = Partition(owner, reader)
    with stack.phase(CASE, "parted"):
        assert partition.inject(stack).landed
        for engine in (owner, reader):
            prompt = stack.prompts(CASE).fresh(f"parted/{engine}", OTHER_TOKENS)
            answer = stack.ask(engine, prompt, "bystander")
            assert answer.ok, f"{engine}, which reaches the master: {answer.http_status} {answer.error}"
    with stack.phase(CASE, "healed"):
        healed = partition.heal(stack)
        assert healed is not None
        assert healed.landed
        got, wanted = external_tokens(stack, "healed")
        assert got == wanted > 0
