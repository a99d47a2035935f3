"""Telemetry: every release's families are found, a real scrape reads as it should, and nothing missing reads as zero."""

import re
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fixtures import telemetry
from fixtures.errors import HarnessError
from fixtures.metric_names import ENGINE_FAMILIES, STORE_FAMILIES
from fixtures.telemetry import MissingMetric, delta, parse_engine, scrape_engine, store_lookups

pytestmark = pytest.mark.selftest

GOLDEN = Path(__file__).parent / "golden"
FAMILIES: dict[str, dict[str, list[str]]] = tomllib.loads((GOLDEN / "metric_families.toml").read_text())
BEFORE = (GOLDEN / "vllm-0.32.0-before.txt").read_text()
AFTER = (GOLDEN / "vllm-0.32.0-after.txt").read_text()
FRESH = (GOLDEN / "vllm-0.32.0-fresh.txt").read_text()
"""Trimmed scrapes of a real engine: before any request; before and after one request of 2,000 tokens whose first 62
blocks another engine had saved."""


def exposition(families: dict[str, list[str]]) -> str:
    """A scrape of an engine with these families, made by the library that vLLM uses; every count is 1."""
    registry = CollectorRegistry()
    for name, labels in families.items():
        kind = (
            Histogram if "seconds" in name else Gauge if name.startswith(("vllm:num_requests", "vllm:kv")) else Counter
        )
        metric = kind(name, "help", ["model_name", "engine", *labels], registry=registry)
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer") if "source" in labels else ("x",)
        for source in sources:
            own = ["lookup_exists", "ok"] if "operation" in labels else [source] * len(labels)
            child = metric.labels("m", "0", *own)
            child.observe(1) if isinstance(child, Histogram) else child.inc()
    return generate_latest(registry).decode()


@pytest.mark.parametrize("version", FAMILIES)
def test_every_release_has_every_family_under_exactly_one_known_name(version: str) -> None:
    declared = {name.removesuffix("_total"): labels for name, labels in FAMILIES[version].items()}
    for names in [family.names for family in ENGINE_FAMILIES] + [family.names for family in STORE_FAMILIES]:
        assert len([name for name in names if name in declared]) == 1, (version, names)
    for family in ENGINE_FAMILIES:
        (labels,) = (declared[name] for name in family.names if name in declared)
        assert labels == ([family.label] if family.label else []), (version, family)


@pytest.mark.parametrize("version", FAMILIES)
def test_a_scrape_of_every_release_reads_as_it_was_written(version: str) -> None:
    values = parse_engine(exposition(FAMILIES[version]), version, store=True)
    touched = {name for name, value in values.items() if value}
    assert touched >= {name for name in values if not name.startswith("store.")}
    assert {name for name in touched if name.startswith("store.")} == {
        f"store.lookup_exists.ok.{family.what}" for family in STORE_FAMILIES
    }


def test_a_real_request_served_from_the_pool() -> None:
    change = delta(parse_engine(BEFORE, "0.32.0", store=True), parse_engine(AFTER, "0.32.0", store=True))
    seen = {name: value for name, value in change.items() if value and not name.endswith(".seconds")}
    assert seen == {
        "local_queries_tokens": 2000,
        "external_queries_tokens": 2000,
        "external_hits_tokens": 1984,
        "prompt_tokens": 2000,
        "prompt_tokens.cached": 1984,
        "prompt_tokens.computed": 16,
        "prompt_tokens.external": 1984,
        "generation_tokens": 8,
        "store.lookup_exists.ok.ops": 1,
        "store.lookup_exists.ok.keys": 62,
        "store.load_get.ok.ops": 1,
        "store.load_get.ok.keys": 62,
        "store.load_get.ok.bytes": 62 * 32 * 2048,
        "store.save_exists.ok.ops": 1,
        "store.save_exists.ok.keys": 62,
    }
    assert store_lookups(change) == 1
    assert parse_engine(AFTER, "0.32.0")["prompt_tokens"] == 2340  # and not the time at which the counter was created


def test_an_unused_engine_declares_its_store_families_without_samples_and_they_read_as_zero() -> None:
    assert 'operation="' not in FRESH
    values = parse_engine(FRESH, "0.32.0", store=True)
    assert values["store.load_get.partial_failure.bytes"] == 0
    assert store_lookups(values) == 0


def test_a_renamed_family_is_named_with_the_version_and_the_nearest_name() -> None:
    text = AFTER.replace("vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_hit_tokens")
    with pytest.raises(MissingMetric, match=r"vLLM 0\.99.*external_hits_tokens.*external_prefix_cache_hit_tokens"):
        parse_engine(text, "0.99")


def test_a_family_without_its_sample_is_missing_and_not_zero() -> None:
    gone = "\n".join(line for line in AFTER.splitlines() if not line.startswith("vllm:prompt_tokens_total"))
    with pytest.raises(MissingMetric, match=r"vllm:prompt_tokens has no sample for prompt_tokens \(it has: none"):
        parse_engine(gone, "0.32.0")


def test_a_renamed_label_value_is_missing_and_not_zero() -> None:
    with pytest.raises(MissingMetric, match=r"no sample for prompt_tokens\.external"):
        parse_engine(AFTER.replace('source="external_kv_transfer"', 'source="external"'), "0.33.0")


def test_a_native_engine_has_no_store_counters_and_no_zero_in_their_place() -> None:
    native = "\n".join(line for line in AFTER.splitlines() if "mooncake" not in line) + "\n"
    values = parse_engine(native, "0.32.0")
    assert not [name for name in values if name.startswith("store.")]
    with pytest.raises(MissingMetric, match="no lookup counters"):
        store_lookups(values)
    with pytest.raises(MissingMetric, match=r"store\.\*\.ops"):
        parse_engine(native, "0.32.0", store=True)


def test_failed_lookups_count_as_lookups() -> None:
    text = AFTER.replace('operation="lookup_exists",status="ok"', 'operation="lookup_exists",status="error"')
    assert store_lookups(parse_engine(text, "0.32.0")) == store_lookups(parse_engine(AFTER, "0.32.0")) == 3


def test_engines_of_one_server_are_added_up_and_their_usage_is_the_fullest_ones() -> None:
    second = [
        line.replace('engine="0"', 'engine="1"')
        for line in AFTER.splitlines()
        if line.startswith(("vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc"))
    ]
    second = [line.rsplit(" ", 1)[0] + " 0.5" if "usage" in line else line for line in second]
    first = re.sub(r"(vllm:kv_cache_usage_perc\{.*\}) .*", r"\1 0.25", AFTER)
    values = parse_engine(first + "\n".join(second) + "\n", "0.32.0")
    assert values["prompt_tokens"] == 2 * parse_engine(AFTER, "0.32.0")["prompt_tokens"]
    assert values["kv_usage_ratio"] == 0.5


def test_a_counter_that_fell_is_a_restart_and_a_gauge_that_fell_is_not() -> None:
    with pytest.raises(HarnessError, match="restarted"):
        delta({"prompt_tokens": 5}, {"prompt_tokens": 4})
    assert delta({"running": 5}, {"running": 4}) == {"running": -1}
    with pytest.raises(HarnessError, match="not of one engine"):
        delta({}, {"prompt_tokens": 4})


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = 200 if self.path == "/metrics" else 404
        self.send_response(status)
        self.end_headers()
        self.wfile.write(AFTER.encode())

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_scraping_over_http(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # a proxy of the user's must not be asked
    assert scrape_engine(url, "0.32.0") == parse_engine(AFTER, "0.32.0")
    with pytest.raises(httpx.HTTPStatusError):
        scrape_engine(f"{url}/nowhere", "0.32.0")
    with pytest.raises(httpx.ConnectError):
        scrape_engine("http://127.0.0.1:9", "0.32.0")


def test_text_that_is_no_exposition() -> None:
    with pytest.raises(HarnessError):
        parse_engine("<html>vllm:prompt_tokens_total</html>", "0.32.0")
    with pytest.raises(HarnessError, match="cannot be parsed"):
        parse_engine('# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total{a="b} x\n', "0.32.0")


def test_only_wanted_lines_reach_the_parser() -> None:
    assert telemetry._family_of('vllm:prompt_tokens_total{engine="0"} 1') == "vllm:prompt_tokens_total"
    assert parse_engine(AFTER + 'other:thing{broken="} 1\n', "0.32.0") == parse_engine(AFTER, "0.32.0")
