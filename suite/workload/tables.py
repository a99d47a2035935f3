"""An analysis as a table for people."""

from __future__ import annotations

from suite.workload.analyse import Analysis, HitRates, Lengths


def table(found: Analysis, token_bytes: int | None = None) -> str:
    """Lines of text. token_bytes: bytes of keys and values a token, to give pool sizes in GiB too."""
    rate = (found.requests - 1) / found.duration_s if found.duration_s else 0.0
    lines = [
        f"requests          {found.requests:,} in {found.duration_s:,.1f} s ({rate:,.2f} /s);"
        f" gaps between arrivals: cv {found.gap_cv:.2f}, longest {found.longest_gap_s:,.1f} s",
        f"prompt tokens     {_spread(found.input_tokens)}",
        f"answer tokens     {_spread(found.output_tokens)}",
        f"distinct blocks   {found.distinct_blocks:,} of {found.block_tokens} tokens;"
        f" an LRU pool of {found.full_pool_blocks:,} hits as often as an infinite one",
        "",
        f"{'pool (blocks)':>14} {'GiB' if token_bytes else '':>9} {'blocks':>8} {'tokens':>8} {'reusable':>9} {'requests':>9}",
    ]
    lines += [_row(found, pool, token_bytes) for pool in (*found.pools, found.infinite)]
    first = found.infinite
    lines += [
        "",
        f"out of: blocks {first.blocks.out_of:,} hash ids; tokens and reusable {first.tokens.out_of:,} prompt tokens;"
        f" requests {first.requests.out_of:,}.",
        f"reusable: whole engine blocks of {found.engine_block_tokens} tokens, never a prompt's last token;"
        " requests: with at least one block hit.",
    ]
    return "\n".join(lines) + "\n"


def _spread(lengths: Lengths) -> str:
    return (
        f"mean {lengths.mean:,.1f}  min {lengths.least:,}  p50 {lengths.p50:,}  p90 {lengths.p90:,}"
        f"  p99 {lengths.p99:,}  max {lengths.greatest:,}"
    )


def _row(found: Analysis, pool: HitRates, token_bytes: int | None) -> str:
    size = "infinite" if pool.pool_blocks is None else f"{pool.pool_blocks:,}"
    blocks = found.distinct_blocks if pool.pool_blocks is None else pool.pool_blocks
    gib = f"{blocks * found.block_tokens * token_bytes / 2**30:,.2f}" if token_bytes else ""
    rates = (pool.blocks, pool.tokens, pool.reusable, pool.requests)
    return f"{size:>14} {gib:>9} " + " ".join(f"{s.rate:>{w}.2%}" for s, w in zip(rates, (8, 8, 9, 9), strict=True))
