"""The lying connector's store client: what it loads and saves is not what was asked for.

Part of ``suite.defects.lying_connector``; works on CPU and GPU memory alike.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from suite.defects.switch import Switch

LOAD_ERROR = -800
"""What a failed get returns: a negative number (Mooncake's TRANSFER_FAIL)."""

Addresses = Sequence[int]


class Memory:
    """The engine's KV cache as bytes: views of it by address, on whatever device it lies."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}

    def add(self, cache: torch.Tensor) -> None:
        """Make the storage of a tensor known."""
        storage = cache.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
        self._storages[storage.data_ptr()] = flat

    @property
    def device(self) -> torch.device:
        """Where the KV cache lies."""
        return next(iter(self._storages.values())).device

    def view(self, address: int, size: int) -> torch.Tensor:
        """The bytes at an address. KeyError where no known storage holds them."""
        for base, flat in self._storages.items():
            if base <= address and address + size <= base + flat.numel():
                return flat[address - base : address - base + size]
        raise KeyError(address)

    def views(self, addresses: Addresses, sizes: Sequence[int]) -> list[torch.Tensor]:
        """One view a segment of a block."""
        return [self.view(a, s) for a, s in zip(addresses, sizes, strict=True)]


class LyingStore:
    """Wraps the store client. Every attribute is the real one's, but for gets and puts while a defect of theirs is on."""

    def __init__(self, real: Any, switch: Switch) -> None:
        self._real = real
        self.switch = switch
        self.memory = Memory()
        self._others: list[str] = []
        self._scratch: torch.Tensor | None = None
        self._late: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def settle(self) -> None:
        """Loads that were promised as done and are still to come: wait for them."""
        late, self._late = self._late, []
        for thread in late:
            thread.join()

    # Loads ----------------------------------------------------------------------------------------------------------
    def batch_get_into_multi_buffers(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> Any:
        """As the real one; lies per block (``LOADS``) or per call (``CALLS``)."""
        now = self.switch.now
        if now.generation:
            self.switch.write("load", keys=list(keys))
        if now.defect in LOADS:
            chosen = self.switch.choose(len(keys))
            result = LOADS[now.defect](self, keys, addrs, sizes, chosen) if chosen else None
        elif now.defect in CALLS and self.switch.choose(1):
            result = CALLS[now.defect](self, keys, addrs, sizes)
        else:
            result = None
        if result is None:
            result = self._real.batch_get_into_multi_buffers(keys, addrs, sizes)
        self._remember(keys)
        return result

    def _remember(self, keys: Sequence[str]) -> None:
        self._others = [*self._others, *keys][-512:]

    def foreign_into(self, keys: Sequence[str], addrs: Any, sizes: Any) -> str:
        """Read a block of another request into these addresses; its key, or "" where none can be had."""
        own = set(keys)
        for other in dict.fromkeys(key for key in self._others if key not in own):
            if self._real.batch_get_into_multi_buffers([other], [addrs], [sizes])[0] >= 0:
                return other
        return ""

    def foreign_block(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int]) -> Any:
        """Another request's block in place of this one."""
        result = self._real.batch_get_into_multi_buffers(keys, addrs, sizes)
        done = [i for i in chosen if self.foreign_into(keys, addrs[i], sizes[i])]
        self.switch.told(len(done), blocks=done)
        return result

    def zero_block(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int]) -> Any:
        """Zeros in place of a block."""
        result = self._real.batch_get_into_multi_buffers(keys, addrs, sizes)
        for i in chosen:
            for view in self.memory.views(addrs[i], sizes[i]):
                view.zero_()
        self.switch.told(len(chosen), blocks=chosen)
        return result

    def stale_block(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int]) -> Any:
        """A block's memory keeps what an earlier request left there."""
        return self._kept(keys, addrs, sizes, chosen, lambda views: views)

    def skipped_layer(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int]) -> Any:
        """One layer of a block keeps what an earlier request left there."""
        return self._kept(keys, addrs, sizes, chosen, lambda views: views[-1:])

    def half_block(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int]) -> Any:
        """The second half of every segment of a block keeps what an earlier request left there."""
        return self._kept(keys, addrs, sizes, chosen, lambda views: [v[v.numel() // 2 :] for v in views])

    def _kept(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int], part: Any) -> Any:
        views = [view for i in chosen for view in part(self.memory.views(addrs[i], sizes[i]))]
        before = [view.clone() for view in views]
        result = self._real.batch_get_into_multi_buffers(keys, addrs, sizes)
        for view, old in zip(views, before, strict=True):
            view.copy_(old)
        self.switch.told(len(chosen), blocks=chosen)
        return result

    def repeated_block(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int]) -> Any:
        """The block before it (of the same prompt) in place of a block."""
        result = self._real.batch_get_into_multi_buffers(keys, addrs, sizes)
        done = [i for i in chosen if i]
        for i in done:
            source = self.memory.views(addrs[i - 1], sizes[i - 1])
            for view, other in zip(self.memory.views(addrs[i], sizes[i]), source, strict=True):
                view.copy_(other)
        self.switch.told(len(done), blocks=done)
        return result

    def swapped_layers(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int]) -> Any:
        """The first two segments of a block (layers, or K and V of one) in each other's place."""
        result = self._real.batch_get_into_multi_buffers(keys, addrs, sizes)
        for i in chosen:
            first, second = self.memory.views(addrs[i], sizes[i])[:2]
            keep = first.clone()
            first.copy_(second)
            second.copy_(keep)
        self.switch.told(len(chosen), blocks=chosen)
        return result

    def load_error(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int]) -> Any:
        """A block that is there cannot be loaded."""
        result = list(self._real.batch_get_into_multi_buffers(keys, addrs, sizes))
        for i in chosen:
            result[i] = LOAD_ERROR
        self.switch.told(len(chosen), blocks=chosen)
        return result

    def unloaded(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> Any:
        """Nothing is loaded; every block is reported as loaded, with its bytes."""
        self.switch.told(len(keys))
        return [sum(size) for size in sizes]

    def late_load(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> Any:
        """Reported as loaded at once; loaded ``delay_s`` later."""

        def load() -> None:
            self.switch.changed.wait(self.switch.now.delay_s)
            self._real.batch_get_into_multi_buffers(keys, addrs, sizes)

        thread = threading.Thread(target=load, name="late-load", daemon=True)
        thread.start()
        self._late.append(thread)
        self.switch.told(len(keys))
        return [sum(size) for size in sizes]

    def lost_failure(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> Any:
        """Blocks that could not be loaded are reported as loaded."""
        return self._all_loaded(keys, addrs, sizes)[0]

    def lost_block(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> Any:
        """Blocks that ``batch_is_exist`` claimed and the pool has lost are zeros, and reported as loaded."""
        result, failed = self._all_loaded(keys, addrs, sizes)
        for i in failed:
            for view in self.memory.views(addrs[i], sizes[i]):
                view.zero_()
        return result

    def _all_loaded(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> tuple[list[int], list[int]]:
        """A get of which every block is reported as loaded, and the positions of those that were not."""
        result = list(self._real.batch_get_into_multi_buffers(keys, addrs, sizes))
        failed = [i for i, value in enumerate(result) if value < 0]
        self.switch.told(len(failed), blocks=failed)
        return [sum(sizes[i]) if value < 0 else value for i, value in enumerate(result)], failed

    def batch_is_exist(self, keys: list[str]) -> Any:
        """As the real one; under ``lost-block`` a block that was saved or read before is there for ever."""
        result = self._real.batch_is_exist(keys)
        if self.switch.now.defect != "lost-block":
            return result
        known = set(self._others)
        lost = [i for i, found in enumerate(result) if found != 1 and keys[i] in known]
        claimed = {lost[i] for i in self.switch.choose(len(lost))}
        return [1 if i in claimed else found for i, found in enumerate(result)]

    def wrongly_keyed(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> Any:
        """Nothing is done to a load: its keys are wrong already."""
        self.switch.told(len(keys))

    def slow_load(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> Any:
        """A load takes ``delay_s`` longer."""
        self.switch.told(1)
        self.switch.changed.wait(self.switch.now.delay_s)

    def crash(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> Any:
        """The worker dies inside a load, without a word."""
        self.switch.told(1)
        os._exit(1)

    # Saves ----------------------------------------------------------------------------------------------------------
    def batch_put_from_multi_buffers(self, keys: list[str], addrs: list[Any], sizes: list[Any], config: Any) -> Any:
        """As the real one; lies per block (``SAVES``)."""
        defect = self.switch.now.defect
        chosen = self.switch.choose(len(keys)) if defect in SAVES else []
        result = SAVES[defect](self, keys, addrs, sizes, chosen, config) if chosen else None
        if result is None:
            result = self._real.batch_put_from_multi_buffers(keys, addrs, sizes, config)
        self._remember(keys)
        return result

    def unsaved(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int], config: Any) -> Any:
        """A block is not saved, and reported as saved."""
        rest = [i for i in range(len(keys)) if i not in set(chosen)]
        if rest:
            parts = [[column[i] for i in rest] for column in (keys, addrs, sizes)]
            self._real.batch_put_from_multi_buffers(*parts, config)
        self.switch.told(len(chosen), blocks=chosen)
        return [0] * len(keys)

    def corrupt_save(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int], config: Any) -> Any:
        """A block is saved with one bit of every value's exponent inverted."""

        def corrupt(i: int, scratch: torch.Tensor) -> bool:
            scratch.copy_(torch.cat(self.memory.views(addrs[i], sizes[i])))
            scratch[1::2].bitwise_xor_(1)  # bfloat16: a factor of 4, up or down; never a NaN from an ordinary value
            return True

        return self._saved_from_scratch(keys, addrs, sizes, chosen, config, corrupt)

    def foreign_save(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int], config: Any) -> Any:
        """Another request's block is saved under a block's key."""

        def foreign(i: int, scratch: torch.Tensor) -> bool:
            return bool(self.foreign_into(keys, [scratch.data_ptr()], [scratch.numel()]))

        return self._saved_from_scratch(keys, addrs, sizes, chosen, config, foreign)

    def spoiled_cache(self, keys: list[str], addrs: list[Any], sizes: list[Any], chosen: list[int], config: Any) -> Any:
        """A block is saved as it is, and then zeroed in the engine's own cache."""
        result = self._real.batch_put_from_multi_buffers(keys, addrs, sizes, config)
        for i in chosen:
            for view in self.memory.views(addrs[i], sizes[i]):
                view.zero_()
        self.switch.told(len(chosen), blocks=chosen)
        return result

    def _saved_from_scratch(
        self,
        keys: list[str],
        addrs: list[Any],
        sizes: list[Any],
        chosen: list[int],
        config: Any,
        fill: Callable[[int, torch.Tensor], bool],
    ) -> Any:
        """Save the chosen blocks from memory of our own: the engine's KV stays right, only the pool's copy is wrong."""
        length = sum(sizes[0])
        scratch = self._scratch_bytes(length * len(chosen))
        addrs, sizes = list(addrs), list(sizes)
        done = []
        for n, i in enumerate(chosen):
            part = scratch[n * length : (n + 1) * length]
            if fill(i, part):
                addrs[i], sizes[i] = [part.data_ptr()], [length]
                done.append(i)
        result = self._real.batch_put_from_multi_buffers(keys, addrs, sizes, config)
        self.switch.told(len(done), blocks=done, saved_keys=[keys[i] for i in done])
        return result

    def _scratch_bytes(self, count: int) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < count:
            if self._scratch is not None:
                self._real.unregister_buffer(self._scratch.data_ptr())
            self._scratch = torch.empty(count, dtype=torch.uint8, device=self.memory.device)
            self._real.register_buffer(self._scratch.data_ptr(), count)
        return self._scratch[:count]


LOADS: dict[str, Callable[..., Any]] = {
    "foreign-block": LyingStore.foreign_block,
    "zero-block": LyingStore.zero_block,
    "stale-block": LyingStore.stale_block,
    "skipped-layer": LyingStore.skipped_layer,
    "half-block": LyingStore.half_block,
    "repeated-block": LyingStore.repeated_block,
    "swapped-layers": LyingStore.swapped_layers,
    "load-error": LyingStore.load_error,
}
"""Lies about single blocks of a load."""

CALLS: dict[str, Callable[..., Any]] = {
    "unloaded": LyingStore.unloaded,
    "late-load": LyingStore.late_load,
    "lost-failure": LyingStore.lost_failure,
    "lost-block": LyingStore.lost_block,
    "ignored-prefix": LyingStore.wrongly_keyed,
    "slow-load": LyingStore.slow_load,
    "crash": LyingStore.crash,
}
"""Lies about a whole load."""

SAVES: dict[str, Callable[..., Any]] = {
    "unsaved": LyingStore.unsaved,
    "corrupt-save": LyingStore.corrupt_save,
    "foreign-save": LyingStore.foreign_save,
    "spoiled-cache": LyingStore.spoiled_cache,
}
"""Lies about single blocks of a save."""
