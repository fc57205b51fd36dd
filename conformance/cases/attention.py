"""Cases of reshape_and_cache, paged_attention_v2 and paged_prefill: all their clauses, field bugs 17 to 20.

A change takes the op's example arguments and returns those it replaces; what it does to the cache it does in place.
"""

from __future__ import annotations

import torch

from conformance import case
from conformance.case import FLOATS, example

WRITE, DECODE, PREFILL = "reshape_and_cache", "paged_attention_v2", "paged_prefill"
NAN, INF = float("nan"), float("inf")
GARBAGE = (2**31 - 1, -(2**31), -1, 1_000_000_007)  # what a block table may hold where nobody looks


def table(op, kind, sizes=({},), change=None, dtypes=FLOATS, level="quick", raises=None):
    """Cases on the op's example arguments, after `change(arguments)` where given."""

    def make(generator, device, dtype, **sizes):
        arguments = example(op, generator, device, dtype, **sizes)
        return arguments | (change(arguments) or {})

    return case.table(op, kind, sizes, dtypes, level, make if change else None, None, raises)


def on_caches(function):
    """A change that rebuilds both caches, each with what it holds."""

    def change(arguments):
        return {name: function(arguments[name]) for name in ("key_cache", "value_cache")}

    return change


# ---- layouts ---------------------------------------------------------------------------------------------------------


def padded_pages(cache):
    """Pages padded to an odd size, NaN between them: hybrid models' pages are as large as the largest state's."""
    page = cache[0].numel()
    pool = cache.new_full((len(cache), page + 3 * cache.shape[3]), NAN)
    view = pool[:, :page].view(cache.shape)
    return view.copy_(cache)


def head_major(cache):
    """Heads before tokens within a page, as some backends lay them out; refused or right."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def key_beside_value(arguments):
    """Each token's value right behind its key: [NB,BS,HK,2D]."""
    both = torch.cat([arguments["key_cache"], arguments["value_cache"]], dim=-1)
    size = both.shape[-1] // 2
    return {"key_cache": both[..., :size], "value_cache": both[..., size:]}


def two_buffers(arguments):
    """Keys and values in buffers of different strides."""
    return {"key_cache": arguments["key_cache"].contiguous(), "value_cache": padded_pages(arguments["value_cache"])}


def shifted(tensor):
    """The same values at an address that is aligned to nothing but the element."""
    buffer = tensor.new_full((tensor.numel() + 1,), NAN)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def misaligned(arguments):
    return {name: shifted(arguments[name]) for name in ("q", "key", "key_cache") if name in arguments}


def sparse_rows(arguments):
    """Tokens and heads of q far apart, NaN between them."""
    q = arguments["q"]
    wide = q.new_full((len(q), 2 * q.shape[1], q.shape[2]), NAN)
    wide[:, ::2] = q
    return {"q": wide[:, ::2]}


def gap_columns(arguments):
    """Block tables that are columns of a wider table."""
    tables = arguments["block_tables"]
    wide = torch.full((len(tables), tables.shape[1] + 5), -7, dtype=tables.dtype, device=tables.device)
    wide[:, :-5] = tables
    return {"block_tables": wide[:, :-5]}


# ---- what does not matter, and what does -----------------------------------------------------------------------------


def slots(arguments, first=None):
    """[NB,BS] bool: the slots that the sequences' tokens are in (from token first(n) on)."""
    cache, tables = arguments["key_cache"], arguments["block_tables"]
    used = torch.zeros(cache.shape[:2], dtype=torch.bool, device=cache.device)
    for n, length in enumerate(arguments["seq_lens"].tolist()):
        token = torch.arange(first(n) if first else 0, length, device=cache.device)
        used[tables[n, token // cache.shape[1]].long(), token % cache.shape[1]] = True
    return used


def unused_nan(arguments):
    """NaN in every slot that no token is in: whole blocks, and the tails of last ones."""
    unused = ~slots(arguments)
    for name in ("key_cache", "value_cache"):
        arguments[name][unused] = NAN


def before_window_gone(arguments):
    """What lies before every window was given back: its slots hold NaN, whole blocks are garbage in the table."""
    block_size, window, tables = arguments["key_cache"].shape[1], arguments["window"], arguments["block_tables"]
    lengths, new = arguments["seq_lens"].tolist(), new_tokens(arguments)
    first = [max(0, length - count - window + 1) for length, count in zip(lengths, new, strict=True)]
    unused = ~slots(arguments, lambda n: first[n])
    for name in ("key_cache", "value_cache"):
        arguments[name][unused] = NAN
    for n, token in enumerate(first):
        tables[n, : token // block_size] = GARBAGE[n % len(GARBAGE)]


def new_tokens(arguments):
    bounds = arguments.get("cu_seqlens_q")
    return [1] * len(arguments["seq_lens"]) if bounds is None else bounds.diff().tolist()


def garbage_tails(arguments):
    """Table entries beyond the last block: any int32."""
    tables, block_size = arguments["block_tables"], arguments["key_cache"].shape[1]
    for n, length in enumerate(arguments["seq_lens"].tolist()):
        tail = tables[n, -(-length // block_size) :]
        tail.copy_(torch.tensor(GARBAGE, dtype=torch.int32).repeat(1 + len(tail) // 4)[: len(tail)])


def at_token(name, value, back, sequence=0, dimension=3):
    """A change that writes `value` into a cache, `back` tokens before the end of a sequence, in its last key head."""

    def change(arguments):
        cache = arguments[name]
        token = int(arguments["seq_lens"][sequence]) - 1 - back
        block = arguments["block_tables"][sequence, token // cache.shape[1]]
        cache[block.long(), token % cache.shape[1], -1, dimension] = value

    return change


def no_length(arguments):
    """All sequences but the first are padding, as a captured graph replays it: a row of q, no token."""
    arguments["seq_lens"][1:] = 0
    arguments["q"][-2:] = NAN


def rows_before(arguments):
    """Rows of q before the first sequence are as those after the last."""
    q = arguments["q"]
    return {"q": torch.cat([torch.full_like(q[:5], NAN), q]), "cu_seqlens_q": arguments["cu_seqlens_q"] + 5}


def one_in_eight(arguments):
    """Of many sequences seven in eight are padding: references take their time for each of the others."""
    padding = torch.arange(len(arguments["seq_lens"])) % 8 != 3
    arguments["seq_lens"][padding] = 0
    arguments["q"][padding] = NAN


def no_tables(arguments):
    """Padding alone, and tables without a column."""
    arguments["seq_lens"][:] = 0
    arguments["q"][:] = NAN
    return {"block_tables": arguments["block_tables"][:, :0]}


def nan_query(arguments):
    arguments["q"][1, 2, 5] = NAN


def shared_blocks(arguments):
    """Sequences with a common prefix read the same blocks; one is another's copy."""
    tables = arguments["block_tables"]
    tables[1] = tables[0]
    tables[2, :2] = tables[0, :2]


def one_block(arguments):
    """A sequence whose table names one block again and again."""
    arguments["block_tables"][:] = arguments["block_tables"][:, :1].clone()


def scaled_query(factor):
    def change(arguments):
        arguments["q"].mul_(factor)

    return change


def far_blocks(generator, device, dtype, ids, BS, D, op, **sizes):
    """Block ids that need all of their bits. The pool's pages overlap, 16 elements apart, so that it costs little."""
    NB = max(ids) + 1
    pools = (torch.randn(16 * NB + BS * D, generator=generator).to(device, dtype) for _ in range(2))
    keys, values = (pool.as_strided((NB, BS, 1, D), (16, D, D, 1)) for pool in pools)
    arguments = example(op, generator, device, dtype, BS=BS, D=D, HK=1, **sizes)
    order = torch.tensor(ids, dtype=torch.int32, device=device)
    arguments["block_tables"] = torch.stack([order.roll(n) for n in range(len(arguments["seq_lens"]))])
    return arguments | {"key_cache": keys, "value_cache": values}


# ---- cache writes ----------------------------------------------------------------------------------------------------


def far_slots(arguments):
    cache = arguments["key_cache"]
    last = cache.shape[0] * cache.shape[1] - 1
    return {"slot_mapping": torch.tensor([last, 0, 65535 * 8, 65536 * 8 + 3], device=cache.device)}


def negative_slots(arguments):
    arguments["slot_mapping"][::3] = -1
    arguments["slot_mapping"][1::5] = -(2**40)


def nan_values(arguments):
    """A copy keeps every value; tokens without a slot leave no trace, whatever they hold."""
    arguments["key"][0, 0, :4] = torch.tensor([NAN, INF, -INF, -0.0])
    arguments["key"][1], arguments["value"][1] = NAN, NAN
    arguments["slot_mapping"][1] = -1


def split_heads(arguments):
    """Heads of key and value with gaps between them."""
    return {name: sparse_rows({"q": arguments[name]})["q"] for name in ("key", "value")}


def replaced(name, value):
    """A change that puts a wrong argument in; a function of the right one makes it."""
    return lambda arguments: {name: value(arguments[name])}


def wrong(op, kind, name, value):
    """A call that has to be refused because of that argument."""
    return table(op, kind, change=replaced(name, value), dtypes=FLOATS[:1], raises=name)


F32, HALVES = FLOATS[:1], FLOATS[1:]
WIDTHS = (64, 80, 96, 112, 120, 128, 192, 256)  # field bug 19
PAGES = (8, 16, 256, 544, 784)
SMALL = {"HQ": 4, "HK": 2, "D": 64}
ONE = {"HQ": 2, "HK": 1, "D": 64}

WRITES = [
    *table(WRITE, "sizes", [{"T": t, "HK": h, "D": d} for t, h, d in ((1, 2, 256), (7, 8, 128), (65, 1, 80))]),
    *table(WRITE, "many_tokens", [{"T": 300, "HK": 4, "D": 64}]),
    *table(WRITE, "page_sizes", [{"T": 70, "HK": 2, "D": 64, "BS": bs} for bs in PAGES]),
    *table(WRITE, "head_sizes", [{"T": 9, "HK": 2, "D": d} for d in (*WIDTHS, 8, 40)], dtypes=HALVES[1:]),
    *table(WRITE, "odd_head_sizes", [{"T": 9, "HK": 2, "D": d} for d in (1, 20, 63)], dtypes=HALVES[1:]),
    *table(WRITE, "empty", [{"T": 0, "NB": 2}]),
    *table(WRITE, "negative_slots", change=negative_slots),
    *table(WRITE, "no_slots", change=lambda a: {"slot_mapping": torch.full_like(a["slot_mapping"], -1)}),
    *table(WRITE, "nan_values", [{"T": 5, "HK": 2, "D": 64}], nan_values),
    *table(WRITE, "block_ids", [{"T": 4, "HK": 1, "D": 8, "BS": 8, "NB": 65_546}], far_slots, HALVES[1:]),
    *table(WRITE, "split_heads", change=split_heads),
    *table(WRITE, "padded_pages", change=on_caches(padded_pages)),
    *table(WRITE, "head_major", change=on_caches(head_major)),
    *table(WRITE, "key_beside_value", change=key_beside_value),
    *table(WRITE, "two_buffers", change=two_buffers),
    *table(WRITE, "misaligned", [{"T": 9, "HK": 2, "D": 64}], misaligned),
    *table(WRITE, "sizes_large", [{"T": t, "BS": 544} for t in (2048, 4097)], level="standard"),
    *wrong(WRITE, "int32_slots", "slot_mapping", lambda t: t.int()),
    *wrong(WRITE, "slots_too_few", "slot_mapping", lambda t: t[1:]),
    *wrong(WRITE, "value_shape", "value", lambda t: t[:, :1]),
    *wrong(WRITE, "value_dtype", "value", lambda t: t.half()),
    *wrong(WRITE, "cache_dtype", "key_cache", lambda t: t.half()),
    *table(WRITE, "cache_heads", change=on_caches(lambda t: t[:, :, :1]), dtypes=F32, raises="key_cache"),
    *wrong(WRITE, "cache_size", "key_cache", lambda t: t[..., :64]),
    *wrong(WRITE, "cache_shape", "value_cache", lambda t: t[1:]),
]

FORMS = ({"window": 20}, {"softcap": 5.0}, {"alibi": True}, {"window": 33, "softcap": 0.5, "alibi": True})


def both(lengths_of, kind, sizes, **how):
    """A table for decode and one for prefill; lengths_of(op) gives the sequences of each size."""
    return [
        one
        for op in (DECODE, PREFILL)
        for one in table(op, kind, [size | lengths for size in sizes for lengths in lengths_of(op)], **how)
    ]


def short(op):
    return [{"lengths": (37, 1, 64)} if op == DECODE else {"new": (20, 1, 33), "prefix": (0, 36, 31)}]


def default(op):
    return [{}]


HEADS = ((16, 2, 256), (32, 8, 128), (8, 8, 64), (3, 1, 96))
ATTENTION = [
    *both(default, "heads", [dict(zip(("HQ", "HK", "D"), h, strict=True)) for h in HEADS]),
    *both(short, "heads_many", [{"HQ": 64, "HK": 1, "D": 64}, {"HQ": 40, "HK": 8, "D": 32}], dtypes=F32),
    *both(short, "head_sizes", [{"HQ": 4, "HK": 2, "D": d} for d in (*WIDTHS, 8, 40)]),
    *both(short, "odd_head_sizes", [{"HQ": 4, "HK": 2, "D": d} for d in (1, 20, 63)], dtypes=HALVES[1:]),
    *both(short, "scale", [SMALL], change=lambda a: {"scale": 0.3}, dtypes=F32),
    *both(short, "scale_negative", [SMALL, SMALL | FORMS[3]], change=lambda a: {"scale": -0.3}),
    *both(short, "scale_0", [SMALL], change=lambda a: {"scale": 0.0}, dtypes=F32),
    *both(short, "page_sizes", [SMALL | {"BS": bs} for bs in PAGES]),
    *both(short, "forms", [SMALL | form for form in FORMS]),
    *both(short, "window_sizes", [SMALL | {"window": w} for w in (1, 2, 36, 1000)], dtypes=F32),
    *both(short, "unused_nan", [SMALL | {"BS": bs} for bs in (16, 256)], change=unused_nan),
    *both(short, "unused_nan_forms", [SMALL | form for form in FORMS], change=unused_nan, dtypes=HALVES[1:]),
    *both(short, "before_window_gone", [SMALL | {"window": 9, "BS": bs} for bs in (8, 16)], change=before_window_gone),
    *both(short, "garbage_tails", [SMALL], change=garbage_tails),
    *both(default, "shared_blocks", [SMALL], change=shared_blocks, dtypes=F32),
    *both(short, "one_block", [SMALL], change=one_block, dtypes=F32),
    *both(short, "nan_query", [SMALL], change=nan_query),
    *both(short, "nan_key", [SMALL], change=at_token("key_cache", NAN, 7)),
    *both(short, "nan_value", [SMALL], change=at_token("value_cache", NAN, 7)),
    *both(short, "inf_value", [SMALL], change=at_token("value_cache", -INF, 7)),
    *both(short, "inf_key", [SMALL], change=at_token("key_cache", INF, 7), dtypes=F32),
    *both(short, "nan_before_window", [SMALL | {"window": 5}], change=at_token("value_cache", NAN, 9)),
    *both(short, "large_scores", [SMALL], change=scaled_query(40)),
    *both(short, "zero_query", [SMALL], change=scaled_query(0), dtypes=F32),
    *both(short, "sparse_rows", [SMALL], change=sparse_rows),
    *both(short, "gap_columns", [SMALL], change=gap_columns, dtypes=F32),
    *both(short, "padded_pages", [SMALL, {"BS": 544}], change=on_caches(padded_pages)),
    *both(short, "head_major", [SMALL], change=on_caches(head_major)),
    *both(short, "key_beside_value", [SMALL], change=key_beside_value),
    *both(short, "two_buffers", [SMALL], change=two_buffers),
    *both(short, "misaligned", [SMALL], change=misaligned),
]  # fmt: skip

FAR = tuple(range(65_530, 65_546))  # field bug 17
DECODES = [
    *table(DECODE, "lengths", [ONE | {"lengths": (2**n - 1, 2**n)} for n in (1, 4, 5, 6, 7, 8, 9, 10)], dtypes=F32),
    *table(DECODE, "long", [ONE | {"lengths": (n,), "BS": bs} for bs in (16, *PAGES[2:]) for n in (4095, 4096, 4097)]),
    *table(DECODE, "longest", [ONE | {"lengths": (16384,), "BS": bs} for bs in (256, 544, 784)], dtypes=HALVES[1:]),
    *table(DECODE, "long_forms", [ONE | {"lengths": (5000, 3), "BS": 784} | form for form in FORMS], dtypes=F32),
    *table(DECODE, "ragged", [SMALL | {"lengths": (1, 700, 0, 16, 17, 2049), "BS": bs} for bs in (16, 544)]),
    *table(DECODE, "zero_length", [SMALL | {"lengths": lengths} for lengths in ((0, 5, 0), (0,), (0, 0, 0))]),
    *table(DECODE, "zero_length_window", [SMALL | {"lengths": (0, 30), "window": 8}], unused_nan),
    *table(DECODE, "empty", [SMALL | {"lengths": ()}]),
    *case.table(DECODE, "block_ids", [{"op": DECODE, "ids": FAR, "lengths": (128, 100), "HQ": 2, "BS": 8, "D": 16}],
                HALVES[1:], make=far_blocks),
    *table(DECODE, "sizes_large", [{"lengths": (n,) * b, "BS": 544} for b, n in ((1, 8192), (16, 1024))],
           level="standard"),
    *wrong(DECODE, "lengths_dtype", "seq_lens", lambda t: t.long()),
    *wrong(DECODE, "tables_rows", "block_tables", lambda t: t[1:]),
    *wrong(DECODE, "q_rows", "q", lambda t: t.flatten(1)),
    *wrong(DECODE, "cache_dtype", "value_cache", lambda t: t.half()),
    *wrong(DECODE, "head_size", "key_cache", lambda t: t[..., :64]),
    *wrong(DECODE, "slopes_shape", "alibi_slopes", lambda t: torch.ones(3)),
    *wrong(DECODE, "negative_window", "window", lambda w: -1),
    *wrong(DECODE, "negative_softcap", "softcap", lambda c: -1.0),
]  # fmt: skip

# cuda/paged_prefill_wgmma.cu takes 128 query rows (tokens times heads of a group) at once, of two groups of warps that
# take turns up to D of 128, and 128 keys, or 64 where D is 256: LONG has several tiles of either.
LONG = {"HQ": 4, "HK": 2, "D": 128, "new": (130,), "prefix": (500,)}
TILE_FORMS = (*FORMS, {"window": 200})
MANY = [ONE | {"new": (1,) * 400, "prefix": tuple(n % 41 for n in range(400))}]


def tiles(kind, sizes, change=None, dtypes=HALVES):
    return table(PREFILL, kind, sizes, change, dtypes, "standard")


PREFILLS = [
    *table(PREFILL, "lengths", [ONE | {"new": (n,), "prefix": (0,)} for n in (1, 2, 15, 31, 33, 63, 64, 65, 97, 300)],
           dtypes=F32),
    *table(PREFILL, "cached_prefix", [SMALL | {"new": (n,), "prefix": (p,), "BS": bs} for bs in (16, 256)
                                      for n, p in ((1, 63), (16, 64), (64, 16), (65, 191), (130, 500))]),
    *table(PREFILL, "ragged", [SMALL | {"new": (5, 0, 1, 130, 0), "prefix": (3, 40, 0, 0, 0), "BS": bs}
                               for bs in (16, 544)]),
    *table(PREFILL, "no_new_tokens", [SMALL | {"new": (0, 0), "prefix": (5, 0)}]),
    *table(PREFILL, "zero_length", [SMALL | {"new": (5, 1, 1), "prefix": (3, 9, 0)}], no_length),
    *table(PREFILL, "empty", [SMALL | {"new": (), "prefix": ()}]),
    *table(PREFILL, "padding_rows", [SMALL], lambda a: {"q": torch.cat([a["q"], torch.full_like(a["q"][:5], NAN)])}),
    *table(PREFILL, "long", [ONE | {"new": (70,), "prefix": (4060,), "BS": bs} for bs in (256, 544, 784)]),
    *case.table(PREFILL, "block_ids", [{"op": PREFILL, "ids": FAR, "new": (28, 100), "prefix": (100, 0)}
                                       | {"HQ": 2, "BS": 8, "D": 16}], HALVES[1:], make=far_blocks),
    *table(PREFILL, "sizes_large", [{"new": (512,), "prefix": (p,), "BS": 544} for p in (0, 2048)], level="standard"),
    *tiles("key_tiles", [{"HQ": 4, "HK": 2, "D": d, "new": (n,), "prefix": (p,)} for d in (64, 80, 96, 128, 256)
                         for n, p in ((1, 127), (1, 128), (20, 236), (20, 237), (130, 500))]),
    *tiles("query_tiles", [{"HQ": hq, "HK": 1, "D": 128, "new": new, "prefix": (70,) * len(new)} for hq, new in
                           ((2, (64,)), (2, (65,)), (2, (64, 64)), (2, (64, 65)), (1, (127, 128, 129)))]),
    *tiles("query_tiles_of_groups", [{"HQ": hq, "HK": 1, "D": 128, "new": (200,), "prefix": (60,)} for hq in (3, 5)]),
    *tiles("tiles_forms", [LONG | form for form in TILE_FORMS]),
    *tiles("tiles_unused_nan", [LONG | form for form in ({}, *TILE_FORMS)], unused_nan, HALVES[1:]),
    *tiles("tiles_before_window_gone", [LONG | {"window": w} for w in (20, 200)], before_window_gone),
    *tiles("tiles_nan_value", [LONG], at_token("value_cache", NAN, 7)),
    *tiles("tiles_nan_value_of_all", [LONG], at_token("value_cache", NAN, 300)),
    *tiles("tiles_inf_value", [LONG], at_token("value_cache", -INF, 129)),
    *tiles("tiles_nan_key", [LONG], at_token("key_cache", NAN, 7)),
    *tiles("tiles_nan_query", [LONG], nan_query),
    *tiles("many_sequences", MANY, one_in_eight),
    *table(PREFILL, "many_sequences_whole", MANY, dtypes=HALVES[:1], level="exhaustive"),
    *table(PREFILL, "rows_before_the_first", [SMALL], rows_before),
    *tiles("rows_before_the_first", [LONG], rows_before),
    *tiles("no_tables", [SMALL | {"new": (3, 1), "prefix": (0, 0)}], no_tables),
    *wrong(PREFILL, "bounds_short", "cu_seqlens_q", lambda t: t[1:]),
    *wrong(PREFILL, "bounds_dtype", "cu_seqlens_q", lambda t: t.long()),
    *wrong(PREFILL, "head_count", "q", lambda t: t[0]),
    *table(PREFILL, "cache_heads", change=on_caches(lambda t: torch.cat([t, t, t], 2)), dtypes=F32, raises="key_cache"),
]  # fmt: skip

CASES = [*WRITES, *ATTENTION, *DECODES, *PREFILLS]
