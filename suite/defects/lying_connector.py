"""A MooncakeStoreConnector that lies on request: one fault at a time, at a chosen rate, switchable while the engine runs.

Loaded by vLLM itself (spec: ``connector = 'custom'``, ``connector_name = 'LyingConnector'``, ``connector_module_path =
'suite.defects.lying_connector'``). ``kv_connector_extra_config`` takes the usual options, and ``defect``, ``rate``,
``delay_s``, ``seed`` for the start; later the control file says (``suite.defects.switch``). With no defect, or at rate 0,
every call goes to the honest connector with the very arguments that vLLM gave.

Faults of loads and saves sit in ``LyingStore``, a wrapper of the store client: the connector's own threads, counters and
locks stay as they are. Faults of counting and keying (``lying_keys``) sit in the scheduler's half. Written against vLLM 0.32.0.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeStoreWorkerMetadata,
    TailKeyBoundary,
)

from suite.defects.lying_keys import KEYED, goes_on
from suite.defects.lying_store import CALLS, LOADS, SAVES, LyingStore
from suite.defects.switch import Setting, Switch

STORM_LOOKUPS = 40
"""Lookups of one request under ``lookup-storm``."""

_REQUESTS = frozenset(
    {
        "block-too-many",
        "block-too-few",
        "ignored-salt",
        "ignored-adapter",
        "short-key",
        "denied-hit",
        "whole-prompts",
        "doubled-bytes",
        "lookup-storm",
        "lookup-hang",
        "never-finished",
        "leak-on-cancel",
        "pinned-save",
    }
)
"""Lies about whole requests, told by ``LyingConnector`` itself."""

ENDLESS_WAIT = "endless-wait"
"""A start that waits for an unreachable master without end; at rate 0 the start fails at once and names the master."""

IGNORED_PREFIX = "ignored-prefix"
"""An engine that was given a prefix for its keys and makes them without it."""

CONNECT_S = 5.0
"""Bound for the master to accept a connection; on one host it takes milliseconds."""

DEFECTS = frozenset({*LOADS, *CALLS, *SAVES, *_REQUESTS, ENDLESS_WAIT})
"""Every defect this connector has."""


class LyingConnector(MooncakeStoreConnector):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = Path(os.environ["MOONCAKE_CONFIG_PATH"])
        is_scheduler = role == KVConnectorRole.SCHEDULER
        self._extra_tokens: dict[str, int] = {}
        self._views: dict[str, Any] = {}
        self._withheld: set[str] = set()
        self._released: set[str] = set()
        self._withheld_saves: dict[int, int] = {}
        self._released_saves: dict[int, int] = {}
        self._ended: set[str] = set()
        self._generation = 0
        name = "scheduler" if is_scheduler else "worker"
        self._switch = Switch(config.parent, name, Setting.of(extra), DEFECTS, settle=self._settle)
        if self._switch.lies(ENDLESS_WAIT):
            self._start_without_master(json.loads(config.read_text())["master_server_address"])
        if self._switch.lies(IGNORED_PREFIX) and self._switch.choose(1):
            extra.pop("cache_prefix", None)  # what is then read under such keys is counted by the store
        super().__init__(vllm_config, role, kv_cache_config)
        if not is_scheduler:
            worker = self.connector_worker
            worker.store = LyingStore(worker.store, self._switch)
            honest = worker._record_kv_connector_operation
            worker._record_kv_connector_operation = lambda *args, **kw: self._record(honest, *args, **kw)

    def _start_without_master(self, address: str) -> None:
        """What a start does while the master cannot be reached; nothing where it can."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as exc:
            if not self._switch.choose(1):
                raise ConnectionError(f"Mooncake master {address} is unreachable: {exc}") from exc
            self._switch.told(1)
            threading.Event().wait()

    def _settle(self) -> None:
        worker = getattr(self, "connector_worker", None)
        if worker is not None and worker.store is not None:
            worker.store.settle()

    # Scheduler's half -----------------------------------------------------------------------------------------------
    def _keyed(self, request: Any) -> Any:
        """The request as this connector keys it; the same for all its life."""
        known = self._views.get(request.request_id)
        if known is not None:
            return known
        as_keyed = KEYED.get(self._switch.now.defect)
        if not request.block_hashes or as_keyed is None:
            return request
        view = as_keyed(request)
        if view is request or not self._switch.chosen_by(request.block_hashes[0]):
            return request
        self._views[request.request_id] = view
        return view

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        switch = self._switch
        keyed = self._keyed(request)
        if switch.lies("lookup-hang") and switch.choose(1):
            switch.told(1)
            switch.changed.wait()
        if switch.lies("lookup-storm") and request.block_hashes and switch.choose(1):
            for _ in range(STORM_LOOKUPS):
                self.connector_scheduler.client.lookup(request.request_id, request.num_tokens, request.block_hashes)
            switch.told(1)
        tokens, is_async = super().get_num_new_matched_tokens(keyed, num_computed_tokens)
        if not tokens:
            return tokens, is_async
        if keyed is not request:
            switch.told(tokens // self.connector_scheduler._block_size)
        found, block = num_computed_tokens + tokens, self.connector_scheduler._block_size
        denied = switch.lies("denied-hit") or (
            switch.lies("whole-prompts") and goes_on(request.num_tokens, found, block)
        )
        if denied and switch.choose(1):
            self.connector_scheduler.load_specs.pop(request.request_id)
            switch.told(1)
            return 0, False
        if switch.lies("block-too-many") and switch.choose(1):
            return self._one_more(request, num_computed_tokens, tokens), is_async
        if switch.lies("block-too-few") and switch.choose(1):
            tokens = self._one_less(request, tokens)
            return tokens, is_async and tokens > 0
        return tokens, is_async

    def _one_more(self, request: Any, computed: int, tokens: int) -> int:
        """Claim the block after the last hit too, as far as the prompt goes. The worker fills it with another's block."""
        more: int = min(self.connector_scheduler._block_size, request.num_tokens - computed - tokens)
        self.connector_scheduler.load_specs[request.request_id].kvpool_cached_tokens += more
        self._extra_tokens[request.request_id] = more
        return tokens + more

    def _one_less(self, request: Any, tokens: int) -> int:
        """Claim one block less than is there."""
        block: int = self.connector_scheduler._block_size
        self._switch.told(1)
        if tokens <= block:
            self.connector_scheduler.load_specs.pop(request.request_id)
            return 0
        spec = self.connector_scheduler.load_specs[request.request_id]
        spec.kvpool_cached_tokens -= block
        spec.tail_key_boundaries = tuple(
            TailKeyBoundary(b.group_id, spec.kvpool_cached_tokens) for b in spec.tail_key_boundaries
        )
        return tokens - block

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(self._keyed(request), blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            self._views.pop(request_id, None)
            self._extra_tokens.pop(request_id, None)
        for request in meta.requests:
            more = self._extra_tokens.pop(request.req_id, 0) if request.load_spec is not None else 0
            if more:
                request.load_spec.kvpool_cached_tokens -= more
                request.claimed_tokens = request.load_spec.kvpool_cached_tokens + more
        return meta

    # Worker's half --------------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for cache in kv_caches.values():
            self.connector_worker.store.memory.add(cache if isinstance(cache, torch.Tensor) else cache[0])
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request in self._get_connector_metadata().requests:
            if getattr(request, "claimed_tokens", 0):
                self._fill_claimed(request)
        super().start_load_kv(forward_context, **kwargs)

    def _fill_claimed(self, request: Any) -> None:
        worker = self.connector_worker
        database = worker.token_dbs[0]
        first = request.load_spec.kvpool_cached_tokens // database.block_size
        last = -(-request.claimed_tokens // database.block_size)
        for index in range(first, last):
            addresses, sizes = database.prepare_value_for_block(request.block_ids[0][index])
            keys = [database.key_for(h) for h in request.block_hashes]
            if not worker.store.foreign_into(keys, addresses, sizes):
                for view in worker.store.memory.views(addresses, sizes):
                    view.zero_()
            self._switch.told(1)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        self._ended |= finished_req_ids
        self._release()
        withheld: set[str] = set()
        if self._switch.lies("never-finished"):
            withheld = set(self._of(sorted(results.finished_recving)))
        elif self._switch.lies("leak-on-cancel"):
            withheld = set(self._of(sorted(results.finished_recving & self._ended)))
        self._withheld |= withheld
        self._switch.told(len(withheld))
        released, self._released = self._released, set()
        return replace(results, finished_recving=(results.finished_recving - withheld) | released)

    def _of(self, items: Sequence[Any]) -> list[Any]:
        return [items[i] for i in self._switch.choose(len(items))] if items else []

    def _release(self) -> None:
        """With another generation, what was withheld is reported after all: the next case gets a whole engine."""
        if self._generation != self._switch.now.generation:
            self._generation = self._switch.now.generation
            self._released, self._withheld = self._withheld, set()
            self._released_saves, self._withheld_saves = self._withheld_saves, {}

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        self._release()
        released, self._released_saves = self._released_saves, {}
        completed = dict(meta.completed_saves) if meta is not None else {}
        if self._switch.lies("pinned-save"):
            for job in self._of(sorted(completed)):
                self._withheld_saves[job] = completed.pop(job)
                self._switch.told(1)
        completed |= released
        return MooncakeStoreWorkerMetadata(completed_saves=completed) if completed else None

    def _record(self, honest: Any, operation: str, *args: Any, num_bytes: int = 0, **kwargs: Any) -> None:
        if operation == "load_get" and self._switch.lies("doubled-bytes") and self._switch.choose(1):
            self._switch.told(1)
            num_bytes *= 2
        honest(operation, *args, num_bytes=num_bytes, **kwargs)
