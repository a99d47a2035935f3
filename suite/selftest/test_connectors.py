"""Connectors: what reaches vLLM and Mooncake, and that every step away from upstream's defaults is on record."""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.connectors import ConnectorPlan, plan_connector
from fixtures.spec import StackSpec, parse_spec

pytestmark = pytest.mark.selftest

STORE = "[store]\nsegment_bytes = 1048576\nlocal_buffer_bytes = 2097152\n"


def stack(engine: str = "", store: str = STORE, top: str = "") -> StackSpec:
    return parse_spec(f'name = "x"\n{top}\n{store}\n[engine]\n{engine}\n', "x.toml")


def plan(spec: StackSpec, lookup_port: int | None = 7001) -> ConnectorPlan:
    return plan_connector(spec, spec.engines[0], lookup_port=lookup_port, store_address="127.0.0.1:50051")


def settings(found: ConnectorPlan) -> dict[str, tuple[str, str]]:
    return {d.setting: (d.upstream, d.ours) for d in found.deviations}


def test_native_has_neither_transfer_nor_store_configuration() -> None:
    found = plan(stack('connector = "native"', store=""))
    assert (found.transfer_config, found.store_config, found.deviations) == (None, None, ())


def test_the_stores_default_is_isolated_and_recomputes() -> None:
    found = plan(stack())
    assert found.transfer_config == {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lookup_rpc_port": 7001},
    }
    assert settings(found)["kv_load_failure_policy"] == ("fail", "recompute")
    assert settings(found)["kv_connector_extra_config.lookup_rpc_port"] == ("0", "7001")
    assert settings(found)["mooncake.json: protocol"] == ("rdma", "tcp")
    assert settings(found)["mooncake.json: global_segment_size"] == ("4294967296", "1048576")


def test_upstream_defaults_are_left_out_and_are_no_deviation() -> None:
    spec = stack('load_failure_policy = "upstream"\nisolate_lookup = false')
    found = plan(spec)
    assert found.transfer_config == {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    assert found.load_failure_policy == "fail"
    assert not [name for name in settings(found) if not name.startswith("mooncake.json")]


def test_asking_for_upstreams_own_policy_is_no_deviation() -> None:
    assert "kv_load_failure_policy" not in settings(plan(stack('load_failure_policy = "fail"')))


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [
        ("kv_extra = {load_async = false}", {"lookup_rpc_port": 7001, "load_async": False}),
        ("kv_extra = {lookup_rpc_port = 9}", {"lookup_rpc_port": 9}),
        ("kv_config = {kv_connector_extra_config = {a = 1}}", {"lookup_rpc_port": 7001, "a": 1}),
        ("kv_extra = {a = 1}\nkv_config = {kv_connector_extra_config = {a = 2}}", {"lookup_rpc_port": 7001, "a": 2}),
    ],
)
def test_the_users_extra_settings_win_key_by_key(engine: str, wanted: dict[str, Any]) -> None:
    config = plan(stack(engine)).transfer_config
    assert config is not None
    assert config["kv_connector_extra_config"] == wanted


def test_the_users_whole_configuration_wins_and_is_on_record() -> None:
    found = plan(stack('kv_config = {kv_load_failure_policy = "fail", engine_id = "me"}'))
    assert found.load_failure_policy == "fail"
    assert found.transfer_config is not None
    assert found.transfer_config["engine_id"] == "me"
    assert settings(found)["kv_config.engine_id"] == ("(not set)", "'me'")
    assert "kv_load_failure_policy" not in settings(found)


def test_a_custom_connector_is_loaded_from_its_module_and_joins_the_pool() -> None:
    found = plan(stack('connector = "custom"\nconnector_name = "Lying"\nconnector_module_path = "some.module"'))
    assert found.transfer_config is not None
    assert found.transfer_config["kv_connector"] == "Lying"
    assert found.transfer_config["kv_connector_module_path"] == "some.module"
    assert found.transfer_config["kv_connector_extra_config"] == {"lookup_rpc_port": 7001}
    assert found.store_config is not None


def test_a_custom_connector_without_a_store_has_no_lookup_channel() -> None:
    spec = stack('connector = "custom"\nconnector_name = "C"\nconnector_module_path = "m"', store="")
    found = plan(spec)
    assert found.store_config is None
    assert found.transfer_config is not None
    assert "kv_connector_extra_config" not in found.transfer_config


def test_mooncakes_file(tmp_path: Path) -> None:
    written = plan(stack()).write(tmp_path)
    assert list(written) == ["MOONCAKE_CONFIG_PATH"]
    path = written["MOONCAKE_CONFIG_PATH"]
    assert json.loads(path.read_text()) == {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "127.0.0.1:50051",
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded",
        "global_segment_size": 1048576,
        "local_buffer_size": 2097152,
    }


def test_a_standalone_store_takes_no_memory_from_engines() -> None:
    config = plan(stack(store=STORE + 'mode = "standalone"\nowners = 1\n')).store_config
    assert config is not None
    assert (config["mode"], config["global_segment_size"]) == ("standalone-store", 0)


def test_rdma_names_its_device() -> None:
    found = plan(stack(top='transport = "rdma"\ndevice = "rxe0"'))
    assert found.store_config is not None
    assert (found.store_config["protocol"], found.store_config["device_name"]) == ("rdma", "rxe0")
    assert "mooncake.json: protocol" not in settings(found)


OFFLOAD = "kv_extra = { cpu_bytes_to_use = 1073741824 }\ngpu = 0"


def test_offloading_is_vllms_own_connector_with_its_memory_and_without_a_pool() -> None:
    found = plan(stack(f'connector = "cpu-offload"\n{OFFLOAD}', store="", top='platform = "cuda"'), lookup_port=None)
    assert found.transfer_config == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824},
    }
    assert found.store_config is None


def test_multi_is_the_pool_first_and_the_tier_behind_it() -> None:
    found = plan(stack(f'connector = "multi"\n{OFFLOAD}', top='platform = "cuda"'))
    assert found.transfer_config is not None
    assert found.transfer_config["kv_connector"] == "MultiConnector"
    assert found.transfer_config["kv_connector_extra_config"] == {
        "connectors": [
            {
                "kv_connector": "MooncakeStoreConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lookup_rpc_port": 7001},
            },
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824},
            },
        ]
    }
    assert found.store_config is not None
