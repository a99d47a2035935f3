"""Expected-hit oracle: how many prompt tokens each source must deliver, exactly, from what was sent so far.

What is modelled (vLLM 0.32.0, ``MooncakeStoreConnector``; read in its scheduler and lookup, confirmed by measurement):

- Only whole blocks are reusable, a block is identified by everything before it (a hash chain), and the last token of a
  prompt is always computed: at most ``floor((n - 1) / B) * B`` of ``n`` prompt tokens are reused.
- The engine asks its own prefix cache first. The pool's hit is a contiguous prefix *from the first block on*, also
  where the engine holds those blocks itself; external tokens are what the pool's prefix has beyond the local one.
- A request leaves its full blocks (prompt, and generated tokens whose KV was computed) in its engine's cache, and the
  full blocks of its prompt in the pool, once the save is visible.
- ``cache_salt`` separates: equal prompts under unequal salts share nothing.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reports import records as r


@dataclass(frozen=True)
class Rules:
    """What the tested release does. ``block_tokens`` is the KV block size in tokens.

    saves_single_token_requests: False for vLLM 0.32.0 (measured: a prompt sent with ``max_tokens=1`` is never saved).
    saves_outputs: the connector's ``save_decode_cache``; off by default upstream.
    local_caching: the engine's prefix caching is on.
    spaces: engine -> name of its key space; engines of unequal spaces (other seed, other model) share nothing in the
    pool. Engines not named are all in the space "".
    non_saving: engines that never save (``kv_role = kv_consumer``, or no connector).
    non_loading: engines that never load (no connector, or ``enable_lookup`` off).
    """

    block_tokens: int
    saves_single_token_requests: bool = False
    saves_outputs: bool = False
    local_caching: bool = True
    spaces: Mapping[str, str] = field(default_factory=dict)
    non_saving: frozenset[str] = frozenset()
    non_loading: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens = {self.block_tokens} must be positive")


@dataclass(frozen=True)
class Expected:
    """Tokens that a prompt must get from each source.

    at_most_tokens: most cached tokens (local and external together) that any order of saves, loads and evictions
    could give; for requests that overlap in time.
    """

    local_tokens: int
    external_tokens: int
    prompt_tokens: int
    block_tokens: int
    at_most_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Local and external together: what the response reports."""
        return self.local_tokens + self.external_tokens


class _Cache:
    """Block ids held somewhere; with a capacity (in blocks) the least recently used one leaves first."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, str] = OrderedDict()
        """id -> engine that put it there first."""

    def prefix(self, chain: Sequence[int]) -> int:
        """Number of leading blocks of ``chain`` that are held."""
        blocks = self.blocks
        count = 0
        for block in chain:
            if block not in blocks:
                return count
            count += 1
        return count

    def touch(self, chain: Sequence[int], count: int) -> None:
        """Mark the first ``count`` blocks as used now."""
        if self.capacity is not None:
            for block in reversed(chain[:count]):
                if block in self.blocks:
                    self.blocks.move_to_end(block)

    def put(self, chain: Sequence[int], owner: str) -> None:
        """Hold ``chain``. Tails are older than heads, as a block without its prefix is worth nothing."""
        blocks = self.blocks
        if self.capacity is None:
            for block in chain:
                blocks.setdefault(block, owner)
            return
        for block in reversed(chain):
            blocks.setdefault(block, owner)
            blocks.move_to_end(block)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)


class PoolModel:
    """What every engine's cache and the pool hold, given the requests sent so far.

    Unbounded by default: exact as long as nothing was evicted. ``pool_blocks`` and ``local_blocks`` bound the pool and
    each engine's cache (in blocks); they then forget the least recently used block first. Real stores evict in batches
    and honour leases, so against a store under pressure compare with ``check_hits(..., mode="at-most")``.
    """

    def __init__(self, rules: Rules, *, pool_blocks: int | None = None, local_blocks: int | None = None) -> None:
        self.rules = rules
        self._pool_capacity = pool_blocks
        self._local_capacity = local_blocks
        self._ids: dict[tuple[int, bytes], int] = {}
        self._roots: dict[tuple[str, str | None], int] = {}
        self._pool = _Cache(pool_blocks)
        self._local: dict[str, _Cache] = {}
        self._pending: list[tuple[str, list[int]]] = []
        self._maybe_pool: set[int] = set()
        self._maybe_local: dict[str, set[int]] = {}

    # What was sent --------------------------------------------------------------------------------------------------
    def announce(self, engine: str, prompt: Sequence[int], salt: str | None = None) -> None:
        """A request was sent: from now on its blocks may be anywhere (``Expected.at_most_tokens``)."""
        chain = self._chain(engine, prompt, salt)
        if engine not in self.rules.non_saving:
            self._maybe_pool.update(chain)
        self._maybe_local.setdefault(engine, set()).update(chain)

    def sent(
        self,
        engine: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        output: Sequence[int] = (),
        salt: str | None = None,
    ) -> None:
        """A request was answered. Its blocks are in its engine's cache now, in the pool after ``visible``.

        The KV of the last generated token is never computed, so it belongs to no block.
        """
        self._sent(engine, prompt, salt, self._chain(engine, prompt, salt), max_tokens, output)

    def _sent(
        self,
        engine: str,
        prompt: Sequence[int],
        salt: str | None,
        chain: list[int],
        max_tokens: int,
        output: Sequence[int],
    ) -> None:
        size = self.rules.block_tokens
        whole = chain
        if len(prompt) % size + len(output) - 1 >= size:
            reach = (*prompt[len(chain) * size :], *output[:-1])
            whole = [*chain, *self._extend(chain[-1] if chain else self._root(engine, salt), reach)]
        if self.rules.local_caching:
            self._cache_of(engine).put(whole, engine)
            self._maybe_local.setdefault(engine, set()).update(whole)
        if self._saves(engine, max_tokens):
            saved = whole if self.rules.saves_outputs else chain
            self._pending.append((engine, saved))
            self._maybe_pool.update(saved)

    def visible(self, engine: str | None = None) -> None:
        """The saves answered so far (of one engine, or all) are listed by the store: they can be hit from now on."""
        kept = []
        for saver, chain in self._pending:
            if engine is None or saver == engine:
                self._pool.put(chain, saver)
            else:
                kept.append((saver, chain))
        self._pending = kept

    def used(self, engine: str, prompt: Sequence[int], salt: str | None = None) -> None:
        """A prompt was looked up: renews what it hit (only bounded caches care)."""
        self._used(engine, self._reusable(engine, prompt, salt))

    def _used(self, engine: str, chain: Sequence[int]) -> None:
        for cache in (self._cache_of(engine), self._pool):
            if cache.capacity is not None:
                cache.touch(chain, cache.prefix(chain))

    def observe(self, observation: r.Observation, *, visible: bool = True) -> Expected:
        """One request after the other: what it was to get; then its effect. ``visible``: its save was waited for."""
        o = observation
        prompt = o.prompt_token_ids
        chain = self._chain(o.engine, prompt, o.cache_salt)
        reusable = chain if len(prompt) % self.rules.block_tokens else chain[:-1]
        expected = self._expected(o.engine, len(prompt), reusable)
        self._used(o.engine, reusable)
        if o.ok:
            max_tokens = int(o.sampling.get("max_tokens", max(2, len(o.output_token_ids))))
            self._sent(o.engine, prompt, o.cache_salt, chain, max_tokens, o.output_token_ids)
            if visible:
                self.visible()
        else:  # nobody knows how far it came
            self.announce(o.engine, prompt, o.cache_salt)
        return expected

    # What was lost --------------------------------------------------------------------------------------------------
    def forget_local(self, engine: str) -> None:
        """The engine's own cache is empty (restarted, or reset)."""
        self._local.pop(engine, None)
        self._maybe_local.pop(engine, None)

    def forget_pool(self) -> None:
        """The pool is empty, saves on their way included."""
        self._pool = _Cache(self._pool_capacity)
        self._pending = []
        self._maybe_pool = set()

    def forget_saved_by(self, engine: str) -> None:
        """What this engine saved first is gone: its own segment held it (embedded mode with a preferred local segment)."""
        self._pool.blocks = OrderedDict((b, e) for b, e in self._pool.blocks.items() if e != engine)
        self._pending = [(e, chain) for e, chain in self._pending if e != engine]

    # What to expect -------------------------------------------------------------------------------------------------
    def expected(self, engine: str, prompt: Sequence[int], salt: str | None = None) -> Expected:
        """Tokens the prompt must get from each source if it is sent now and alone."""
        return self._expected(engine, len(prompt), self._reusable(engine, prompt, salt))

    def _expected(self, engine: str, prompt_tokens: int, chain: Sequence[int]) -> Expected:
        size = self.rules.block_tokens
        local = self._cache_of(engine).prefix(chain) if self.rules.local_caching else 0
        loads = engine not in self.rules.non_loading
        pool = self._pool.prefix(chain) if loads else 0
        maybe = _prefix(chain, self._maybe_local.get(engine, set())) if self.rules.local_caching else 0
        if loads:
            maybe = max(maybe, _prefix(chain, self._maybe_pool))
        return Expected(
            local_tokens=local * size,
            external_tokens=max(0, pool - local) * size,
            prompt_tokens=prompt_tokens,
            block_tokens=size,
            at_most_tokens=maybe * size,
        )

    def _saves(self, engine: str, max_tokens: int) -> bool:
        return engine not in self.rules.non_saving and (max_tokens > 1 or self.rules.saves_single_token_requests)

    def _cache_of(self, engine: str) -> _Cache:
        if engine not in self._local:
            self._local[engine] = _Cache(self._local_capacity)
        return self._local[engine]

    def _reusable(self, engine: str, prompt: Sequence[int], salt: str | None) -> list[int]:
        return self._chain(engine, prompt[:-1], salt)

    def _root(self, engine: str, salt: str | None) -> int:
        return self._roots.setdefault((self.rules.spaces.get(engine, ""), salt), -1 - len(self._roots))

    def _chain(self, engine: str, tokens: Sequence[int], salt: str | None) -> list[int]:
        """Ids of the full blocks of ``tokens``."""
        return self._extend(self._root(engine, salt), tokens)

    def _extend(self, parent: int, tokens: Sequence[int]) -> list[int]:
        """Ids of the full blocks that follow ``parent``: interned by (parent, own tokens), so equal means equal."""
        width = self.rules.block_tokens * 8
        packed = array("q", tokens).tobytes()
        ids = self._ids
        chain = []
        for start in range(0, len(packed) - width + 1, width):
            parent = ids.setdefault((parent, packed[start : start + width]), len(ids))
            chain.append(parent)
        return chain


def _prefix(chain: Sequence[int], held: set[int]) -> int:
    count = 0
    for block in chain:
        if block not in held:
            return count
        count += 1
    return count


def replay(model: PoolModel, observations: Iterable[r.Observation], *, visible: bool = True) -> list[Expected]:
    """Expectations of requests sent one after the other, in the order given; feeds ``model``."""
    return [model.observe(o, visible=visible) for o in observations]
