"""LMCache as a connector: what reaches it, what keeps requests apart on it, and which gates may judge it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from fixtures import lmcache
from fixtures.connectors import ConnectorPlan, plan_connector
from fixtures.engines import _check_socket_paths, environment
from fixtures.errors import Untestable, UsageError
from fixtures.pytest_support.header import _engine
from fixtures.pytest_support.run import check_stack
from fixtures.request import Request
from fixtures.spec import LmcacheSpec, StackSpec, load_spec
from fixtures.stack import Engine, Stack
from reports import records as r
from reports.results_tables import Published, source_of
from reports.runinfo import RunInfo, StackInfo
from reports.scoreboard import build
from suite.bench.blocks import chunk_of, complaint
from suite.bench.offload import OFFLOAD
from suite.checks.identity import key_hash, reuse_of, told_apart_by
from suite.checks.logs import classify
from suite.contract import Case
from suite.gates.identity_arms import Party
from suite.gates.judging import counts_loads, sums_and_sources
from suite.gates.test_connector_options import OPTIONS_GATE
from suite.gates.test_hash_parity import SHARE
from suite.gates.test_identity import OTHER_ENGINE
from suite.gates.test_prefix import BOUNDARY, LOCAL

pytestmark = pytest.mark.selftest

ADDRESS = "127.0.0.1:50051"
POOLED, ALONE = load_spec("lmcache-mooncake"), load_spec("lmcache")


def plan(spec: StackSpec) -> ConnectorPlan:
    return plan_connector(spec, spec.engines[0], lookup_port=7001, store_address=ADDRESS if spec.store else "")


def changed(spec: StackSpec, **own: Any) -> StackSpec:
    table = spec.engines[0].lmcache
    assert table is not None
    return spec.with_all_engines(lmcache=msgspec.structs.replace(table, **own))


def settings(found: ConnectorPlan) -> dict[str, tuple[str, str]]:
    return {d.setting: (d.upstream, d.ours) for d in found.deviations}


def test_over_the_pool_everything_lies_in_lmcaches_own_file() -> None:
    found = plan(POOLED)
    assert found.transfer_config == {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"skip_last_n_tokens": 1},
    }
    assert found.store_config is None, (
        "with MOONCAKE_CONFIG_PATH set LMCache reads the pool's settings from there alone"
    )
    assert found.lmcache_config == {
        "chunk_size": 16,
        "local_cpu": False,
        "max_local_cpu_size": 2.0,
        "remote_url": f"mooncakestore://{ADDRESS}/",
        "extra_config": {
            "mooncake_master_server_addr": ADDRESS,
            "mooncake_rdma_devices": "",
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": ADDRESS,
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 4294967296,
            "local_buffer_size": 1073741824,
        },
    }


def test_alone_it_has_host_memory_and_upstreams_chunk() -> None:
    found = plan(ALONE)
    assert found.lmcache_config == {"chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 32.0}
    assert "lmcache.yaml: chunk_size" not in settings(found)
    assert settings(found)["lmcache.yaml: max_local_cpu_size"] == ("5.0", "32.0")


def test_every_step_away_from_the_defaults_is_on_record() -> None:
    found = settings(plan(POOLED))
    assert found["lmcache.yaml: chunk_size"] == ("256", "16")
    assert found["lmcache.yaml: local_cpu"] == ("True", "False")
    assert found["lmcache.yaml: global_segment_size"] == ("3355443200", "4294967296")
    assert found["kv_connector_extra_config.skip_last_n_tokens"] == ("0", "1")
    assert found["LMCACHE_TRACK_USAGE"] == ("(not set)", "false")
    assert "lmcache.yaml: protocol" not in found
    over = settings(plan(changed(POOLED, config={"remote_serde": "cachegen", "extra_config": {"transfer_timeout": 9}})))
    assert over["lmcache.yaml: remote_serde"] == ("(not set)", "cachegen")
    assert over["lmcache.yaml: transfer_timeout"] == ("(not set)", "9")


def test_the_users_settings_win_key_by_key() -> None:
    found = plan(changed(POOLED, config={"chunk_size": 64, "extra_config": {"protocol": "rdma"}})).lmcache_config
    assert found is not None
    assert (found["chunk_size"], found["extra_config"]["protocol"], found["extra_config"]["device_name"]) == (
        64,
        "rdma",
        "",
    )
    whole = plan(changed(POOLED, whole_prompt=True)).transfer_config
    assert whole is not None
    assert "kv_connector_extra_config" not in whole


def test_an_engine_that_gives_no_memory_gives_none() -> None:
    spec = POOLED.with_engine("e0", contributes=False)
    found = plan(spec).lmcache_config
    assert found is not None
    assert found["extra_config"]["global_segment_size"] == 0


def test_the_file_and_its_variable(tmp_path: Path) -> None:
    found = plan(POOLED)
    written = found.write(tmp_path)
    assert written == {"LMCACHE_CONFIG_FILE": tmp_path / "lmcache.yaml"}
    assert json.loads(written["LMCACHE_CONFIG_FILE"].read_text()) == found.lmcache_config
    env = environment(POOLED, POOLED.engines[0], directory=tmp_path, scratch=tmp_path, config_files=written)
    assert env["LMCACHE_CONFIG_FILE"] == str(tmp_path / "lmcache.yaml")
    assert (env["LMCACHE_TRACK_USAGE"], env["PYTHONHASHSEED"]) == ("false", "0")
    assert "MOONCAKE_CONFIG_PATH" not in env


def test_a_folder_too_deep_for_its_sockets_is_refused(tmp_path: Path) -> None:
    engine, found = POOLED.engines[0], plan(POOLED)
    _check_socket_paths(engine, Path("/tmp/kvgates-0/s/12345678"), found)
    deep = Path("/tmp") / ("d" * 30)
    with pytest.raises(UsageError, match="too long a path for its sockets"):
        _check_socket_paths(engine, deep, found)
    _check_socket_paths(load_spec("native").engines[0], deep, found)


def test_the_header_names_chunk_and_memory() -> None:
    assert "LMCache: chunks of 16 tokens, 2048 MiB of host memory to stage in alone" in _engine(POOLED.engines[0])
    assert _engine(ALONE.engines[0]).endswith("chunks of 256 tokens, 32768 MiB of host memory")


def engine_facts(connector: str, lmcache_config: Mapping[str, Any] | None = None) -> r.EngineFacts:
    return r.EngineFacts(
        name="e0", url="", model="m", served_model="m", connector=connector, block_tokens=16, max_model_len=4096,
        load_failure_policy="", hash_seed="0", versions={}, kv_bytes_per_token=64, layers=4,
        settings={} if lmcache_config is None else {"lmcache_config": dict(lmcache_config)},
    )  # fmt: skip


class Bare(Stack):
    """A stack that makes requests and sends none: no engine can be had here."""

    def __init__(self, connector: str) -> None:
        class Plan:
            facts = engine_facts(connector)

        self.spec = POOLED
        self.engines = {"e0": Engine("e0", cast(Any, Plan()), cast(Any, None), cast(Any, None))}
        self._case_id, self._deadline_s, self._numbers = "", None, iter(range(1, 99))  # type: ignore[assignment]
        self._saved_blocks = set()


def params_of(request: Request) -> dict[str, Any]:
    return dict(request.extra.get("kv_transfer_params", {}))


def test_a_salt_that_keeps_apart_is_said_in_lmcaches_way_too_and_one_that_is_judged_is_not() -> None:
    through, plain = Bare("lmcache-mooncake"), Bare("mooncake-store")
    assert params_of(through.request("e0", (1,), "x", cache_salt="red")) == {"lmcache.tag.kvgates": "red"}
    assert params_of(through.request("e0", (1,), "x")) == {}
    assert params_of(plain.request("e0", (1,), "x", cache_salt="red")) == {}
    judged = through.request("e0", (1,), "x", **Party("e0", "", salt="red").fields())
    assert (judged.cache_salt, params_of(judged)) == ("red", {})
    reference = through.request("e0", (1,), "x", **Party("e0", "", adapter="a", salt="red").fields("own"))
    assert (reference.cache_salt, reference.extra["model"], params_of(reference)) == (
        "own",
        "a",
        {lmcache.SALT_TAG: "own"},
    )


def test_blocks_to_wait_for_follow_what_the_keys_hold() -> None:
    """Under a salt alone LMCache saves nothing anew: a wait for new keys would end with its bound, as a save that never came."""
    for connector, second in (("lmcache-mooncake", 0), ("mooncake-store", 2)):
        stack = Bare(connector)
        counts = []
        for salt in ("red", "blue"):
            request = stack.request("e0", tuple(range(40)), "x", cache_salt=salt, salt_alone=True)
            counts.append(
                stack._new_blocks(request.prompt_token_ids, stack._key_salt(request), stack.engines["e0"].facts)
            )
        assert counts == [2, second]


def test_gates_that_cannot_judge_it_say_so() -> None:
    check_stack(BOUNDARY, POOLED, POOLED)
    check_stack(SHARE, POOLED, POOLED)
    check_stack(OFFLOAD, ALONE, ALONE)
    with pytest.raises(Untestable, match="store connector"):
        check_stack(OPTIONS_GATE, POOLED, POOLED)
    for own, word in (
        ({"whole_prompt": True}, "whole prompts"),
        ({"chunk_tokens": 256}, "256 tokens"),
        ({"local_cpu": True}, "own memory"),
    ):
        with pytest.raises(Untestable, match=word):
            check_stack(BOUNDARY, changed(POOLED, **own), POOLED)
    with pytest.raises(Untestable, match="256 tokens"):
        check_stack(LOCAL, ALONE, ALONE)


def test_identity_is_judged_as_upstream_ships_it() -> None:
    cases = {c.id: c for c in OTHER_ENGINE.cases()}
    assert OTHER_ENGINE.stack(POOLED, cases["I.engine.weights.default"]) is POOLED
    with pytest.raises(Untestable, match="protection 'prefix'"):
        OTHER_ENGINE.stack(POOLED, cases["I.engine.weights.prefix"])


def test_no_bytes_are_asked_of_an_engine_that_counts_none() -> None:
    delta = {
        "prompt_tokens": 33.0, "prompt_tokens.computed": 1.0, "prompt_tokens.local": 0.0, "prompt_tokens.external": 32.0,
        "external_hits_tokens": 32.0,
    }  # fmt: skip
    seen = r.Observation(
        request_id="x", case_id="c", phase="p", engine="e0", role="external", prompt_token_ids=tuple(range(33)),
        sent_s=0.0, done_s=1.0, deadline_s=9.0, http_status=200, output_token_ids=(1,), finish_reason="length", cached_tokens=32,
        usage_prompt_tokens=33,
    )  # fmt: skip
    assert sums_and_sources(engine_facts("lmcache-mooncake"), seen, delta) == []
    less = {**delta, "external_hits_tokens": 16.0}
    assert [f.code for f in sums_and_sources(engine_facts("lmcache-mooncake"), seen, less)] == [
        r.FindingCode.SOURCE_DISAGREEMENT
    ]
    with pytest.raises(KeyError, match="store counters"):
        sums_and_sources(engine_facts("mooncake-store"), seen, delta)


def test_what_was_read_across_is_told_without_counters_of_loads() -> None:
    delta = {"prompt_tokens.local": 0.0, "prompt_tokens.external": 992.0, "external_hits_tokens": 992.0}
    seen = r.Observation(
        request_id="x", case_id="c", phase="p", engine="e0", prompt_token_ids=tuple(range(1000)), sent_s=0.0, done_s=1.0, deadline_s=9.0,
        http_status=200, cached_tokens=992,
    )  # fmt: skip
    assert (counts_loads(engine_facts("lmcache-mooncake")), counts_loads(engine_facts("mooncake-store"))) == (
        False,
        True,
    )
    found = reuse_of(seen, delta, counts_loads=False)
    assert (found.any, found.tokens, found.loaded_bytes) == (True, 992, 0)
    with pytest.raises(KeyError, match="no store counters"):
        reuse_of(seen, delta)


def test_an_external_hit_is_whole_chunks() -> None:
    facts = engine_facts("lmcache", {"chunk_size": 256})
    assert (chunk_of(facts), chunk_of(engine_facts("cpu-offload"))) == (256, 16)
    seen = r.Observation(
        request_id="x", case_id="c", phase="p", engine="e0", role="external/ttft-1000/b0/0", prompt_token_ids=tuple(range(1000)),
        sent_s=0.0, first_token_s=0.1, done_s=1.0, deadline_s=9.0, http_status=200, output_token_ids=(1,), finish_reason="length",
    )  # fmt: skip
    before = {"prompt_tokens.local": 0.0, "prompt_tokens.external": 0.0, "prompt_tokens.computed": 0.0}

    def said(external: float, chunk: int) -> str:
        after = {**before, "prompt_tokens.external": external, "prompt_tokens.computed": 1000 - external}
        return complaint("external", seen, {"x:before": before, "x:after": after}, 16, chunk)

    assert said(768.0, 256) == ""
    assert said(992.0, 16) == ""
    assert said(512.0, 256) == said(768.0, 16) == "external: not wholly from the pool"


@pytest.mark.parametrize(
    ("line", "category"),
    [
        ("[2026-11-30 10:00:00,1] LMCache ERROR: Put task failed for key m@1@0@ab@bfloat16", "save-failure"),
        ("LMCache WARNING: Timeout when putting key m@1 using put_parts. Decode instance may redo prefill.", "save-failure"),
        ("LMCache WARNING: Connection is None in batched_contains, returning 0", "lookup-failure"),
        ("LMCache WARNING: lmcache.cuda_ops compiled extension not found; CudaDeviceOps stays on the torch baseline for all ops.", "kernel-fallback"),
        ("LMCache ERROR: Request 1The number of retrieved tokens is less than the expected number of tokens!", "load-failure"),
        ("LMCache ERROR:\x1b[0m something new", "error-line"),
        ("LMCache WARNING: Could not load 'sha256_cbor_64bit' from vLLM. Using builtin hash.", "hash-fallback"),
        ("LMCache WARNING: Could not load 'builtin' from vLLM. Using builtin hash.", None),
        ("LMCache WARNING: remote_url is deprecated and will be removed in a future release.", None),
    ],
)  # fmt: skip
def test_what_its_log_says(line: str, category: str | None) -> None:
    assert classify(line) == category


def test_a_table_of_times_names_lmcache() -> None:
    def source(connector: str, gate: str) -> str:
        verdict = r.Verdict(
            case_id=f"{gate}.t1", gate=gate, gate_version=1, outcome=r.Outcome.PASS, claim="", got="", wanted=""
        )
        info = RunInfo(stacks=(StackInfo(stack_id="s", engines=(engine_facts(connector),)),))
        published = Published(name="x", board=build([verdict], run=info))
        return source_of(published, published.rows[0])

    assert source("lmcache", "B.offload") == "LMCache"
    assert source("cpu-offload", "B.offload") == "host memory"
    assert (source("mooncake-store", "B.ttft"), source("lmcache-mooncake", "B.ttft")) == (
        "pool",
        "pool through LMCache",
    )


def test_the_default_table_is_small() -> None:
    assert replace(Request("e0"), salt_alone=True).salt_alone
    assert LmcacheSpec().local_cpu_bytes == 1 << 30
    assert Case("x").core


def test_what_keeps_two_sides_apart_is_read_off_lmcaches_keys_too() -> None:
    mine = ["/m/a@1@0@-33419171ba25f87b@bfloat16", "/m/a@1@0@2b07@bfloat16"]
    assert key_hash(mine[0]) == "-33419171ba25f87b"
    assert told_apart_by(mine, [k.replace("/m/a", "/m/b") for k in mine]) == "prefix"
    assert told_apart_by(mine, ["/m/a@1@0@99@bfloat16"]) == "hash"
    assert told_apart_by(mine, [f"{k}@kvgates%red" for k in mine]) == "prefix"
    assert (
        told_apart_by(["m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@ab"], ["n@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@ab"])
        == "prefix"
    )
