"""What the properties have to be told of reshape_and_cache, paged_attention_v2 and paged_prefill."""

from __future__ import annotations

import torch

from conformance.cases.attention import FORMS, GARBAGE, NAN, garbage_tails, new_tokens, slots
from conformance.properties.roles import Roles, Route, back, rows_alone, rows_shuffled, shuffled, take

SMALL = {"HQ": 4, "HK": 2, "D": 64}
CACHES = ("key_cache", "value_cache")

# ---- reshape_and_cache -----------------------------------------------------------------------------------------------


def skip_slots(arguments):
    arguments["slot_mapping"][::3] = -1


def nan_everywhere_else(arguments):
    """Tokens without a slot, and all that the caches held."""
    skipped = arguments["slot_mapping"] < 0
    for name in ("key", "value"):
        arguments[name][skipped] = NAN
    for name in CACHES:
        arguments[name][:] = NAN


def blocks_in_another_order(call, arguments):
    """Blocks change places, and with them the slots."""
    order, mapping = shuffled(len(arguments["key_cache"]), arguments["key"]), arguments["slot_mapping"]
    size = arguments["key_cache"].shape[1]
    moved = order.argsort()[mapping.clamp(min=0) // size] * size + mapping % size
    results = call(take(arguments, order, *CACHES) | {"slot_mapping": moved.where(mapping >= 0, mapping)})
    return back(results, order, *CACHES)


def tokens_alone(call, arguments):
    """A call per token."""
    for t in range(len(arguments["key"])):
        results = call(take(arguments, slice(t, t + 1), "key", "value", "slot_mapping"))
    return results


def indexed(call, arguments):
    """By formula: a write through flat slots."""
    used = arguments["slot_mapping"] >= 0
    for name, cache in (("key", "key_cache"), ("value", "value_cache")):
        flat = arguments[cache].flatten(0, 1)
        flat[arguments["slot_mapping"][used]] = arguments[name][used]
        arguments[cache] = flat.view(arguments[cache].shape)
    return {name: arguments[name] for name in CACHES}


WRITE = Roles(
    "reshape_and_cache",
    sizes=({"T": 9, "HQ": 4, "HK": 2, "D": 40, "BS": 8},),
    busy={"T": 400, "HQ": 4, "HK": 2, "D": 64},
    residues=[{"T": 1 + d % 7, "HQ": 1, "HK": 1 + d % 3, "D": d, "BS": 8 * (1 + d % 4)} for d in range(1, 131)],
    prepare=skip_slots,
    irrelevant=nan_everywhere_else,
    routes=(
        Route("permutation", "tokens", rows_shuffled("key", "value", "slot_mapping")),
        Route("permutation", "blocks", blocks_in_another_order),
        Route("batch_invariance", "tokens", tokens_alone),
        Route("identities", "indexed", lambda call, arguments: call(arguments), whole=indexed),
    ),
)

# ---- attention -------------------------------------------------------------------------------------------------------


def nan_where_nobody_looks(arguments):
    """Slots that no query sees, and their table entries: tails, what is before every window, sequences without a query;
    queries that are in no sequence."""
    window, block_size = arguments["window"], arguments["key_cache"].shape[1]
    garbage_tails(arguments)
    firsts = []
    for n, (length, new) in enumerate(zip(arguments["seq_lens"].tolist(), new_tokens(arguments), strict=True)):
        first = max(0, length - new + 1 - window) if window else 0
        firsts.append(first if new else length)
        arguments["block_tables"][n, : firsts[n] // block_size] = GARBAGE[n % len(GARBAGE)]
    unseen = ~slots(arguments, lambda n: firsts[n])
    for name in CACHES:
        arguments[name][unseen] = NAN
    arguments["q"][~real_queries(arguments)] = NAN


def real_queries(arguments):
    """[T] bool: the rows of q that are tokens of a sequence."""
    real = torch.zeros(len(arguments["q"]), dtype=torch.bool, device=arguments["q"].device)
    for (first, end), length in zip(spans_of(arguments), arguments["seq_lens"].tolist(), strict=True):
        real[max(first, end - length) : end] = True
    return real


def spans_of(arguments):
    """Each sequence's rows of q."""
    ends = torch.tensor(new_tokens(arguments), dtype=torch.long).cumsum(0).tolist()
    return list(zip([0, *ends], ends, strict=False))


def pages_in_another_order(call, arguments):
    """Blocks change places, and the tables follow."""
    order, tables = shuffled(len(arguments["key_cache"]), arguments["q"]), arguments["block_tables"]
    inside = (tables >= 0) & (tables < len(order))
    moved = order.argsort()[tables.where(inside, 0).long()].int()
    return call(take(arguments, order, *CACHES) | {"block_tables": moved.where(inside, tables)})


def heads_in_another_order(call, arguments):
    """Groups of query heads change places together with their key head."""
    heads = arguments["key_cache"].shape[2]
    order, group = shuffled(heads, arguments["q"]), arguments["q"].shape[1] // heads
    queries = (order[:, None] * group + torch.arange(group, device=order.device)).flatten()
    changed = {name: arguments[name][:, :, order] for name in CACHES} | {"q": arguments["q"][:, queries]}
    if arguments["alibi_slopes"] is not None:
        changed["alibi_slopes"] = arguments["alibi_slopes"][queries]
    return {"output": call(arguments | changed)["output"][:, queries.argsort()]}


def contiguous(block_size):
    """The way in which every sequence lies in blocks side by side, of another size than they were."""

    def way(call, arguments):
        tokens = [tokens_of(arguments, n) for n in range(len(arguments["seq_lens"]))]
        blocks = max([-(-len(keys) // block_size) for keys, _ in tokens] + [1])
        changed = {}
        for i, name in enumerate(CACHES):
            cache = arguments[name].new_full((len(tokens), blocks * block_size, *arguments[name].shape[2:]), NAN)
            for n, of_sequence in enumerate(tokens):
                cache[n, : len(of_sequence[i])] = of_sequence[i]
            changed[name] = cache.unflatten(1, (blocks, block_size)).flatten(0, 1)
        tables = torch.arange(len(tokens) * blocks, dtype=torch.int32, device=arguments["q"].device)
        return call(arguments | changed | {"block_tables": tables.view(len(tokens), blocks)})

    return way


def tokens_of(arguments, n):
    """Keys and values [L,HK,D] of one sequence."""
    size = arguments["key_cache"].shape[1]
    token = torch.arange(int(arguments["seq_lens"][n]), device=arguments["q"].device)
    block = arguments["block_tables"][n, token // size].long()
    return [arguments[name][block, token % size] for name in CACHES]


def no_query(arguments):
    arguments["q"].zero_()


def mean_of_values(call, arguments):
    """q = 0 weighs all tokens that are seen alike."""
    out = torch.zeros_like(arguments["q"], memory_format=torch.contiguous_format)
    group = out.shape[1] // arguments["key_cache"].shape[2]
    for n, (first, end) in enumerate(spans_of(arguments)):
        values = tokens_of(arguments, n)[1]
        for row in range(max(first, end - len(values)), end):
            seen = values[: len(values) - (end - 1 - row)]
            out[row] = seen.mean(0).repeat_interleave(group, dim=0)
    return {"output": out}


def same_key(arguments):
    """The same vector, added to every key, adds the same number to all scores of a query: exact in every dtype."""
    arguments["key_cache"].copy_((arguments["key_cache"] * 4).round() / 4)


def keys_moved(call, arguments):
    """softmax(s + c) = softmax(s)."""
    return call(arguments | {"key_cache": arguments["key_cache"] + 1})


SHARED = (
    Route("permutation", "pages", pages_in_another_order),
    Route("permutation", "heads", heads_in_another_order),
    *(Route("composition", f"contiguous_{size}", contiguous(size)) for size in (8, 40)),
    Route("identities", "no_query_is_the_mean", lambda call, arguments: call(arguments), whole=mean_of_values, prepare=no_query),
    Route("identities", "softmax_shift", keys_moved, prepare=same_key),
)


def as_prefill(call, arguments):
    """A prefill of one token per sequence; one of length 0 has no place for it."""
    bounds = torch.arange(len(arguments["q"]) + 1, dtype=torch.int32, device=arguments["q"].device)
    return call.of("paged_prefill")(arguments | {"cu_seqlens_q": bounds})


SEQUENCES = ("q", "block_tables", "seq_lens")
LENGTHS = {"lengths": (37, 0, 64, 5)}
DECODE = Roles(
    "paged_attention_v2",
    sizes=(LENGTHS | SMALL, LENGTHS | SMALL | FORMS[-1]),
    busy={"lengths": (1500, 3, 700, 64)} | SMALL,
    residues=[{"lengths": tuple(range(67)), "HQ": 2, "HK": 1, "D": 16, "BS": size} for size in (8, 24)]
    + [{"lengths": (9,), "HQ": 2, "HK": 1, "D": d} for d in range(1, 67)],
    all_residues=[{"lengths": (600,), "HQ": 2, "HK": 1, "D": d, "BS": 16} for d in range(1, 257)]
    + [{"lengths": tuple(range(n, n + 64)), "HQ": 4, "HK": 1, "D": 64, "BS": 16} for n in range(0, 1100, 64)],
    irrelevant=nan_where_nobody_looks,
    routes=(
        *SHARED,
        Route("permutation", "sequences", rows_shuffled(*SEQUENCES)),
        Route("batch_invariance", "sequences", rows_alone(*SEQUENCES)),
        Route("composition", "prefill_of_one_token", as_prefill),
    ),
)


def with_padding(arguments):
    return {"q": torch.cat([arguments["q"], arguments["q"][:3]])}


def part(arguments, sequences, spans, ahead):
    """Arguments of a call with spans of these sequences' queries; ahead: cached tokens that are yet to come, of each."""
    device = arguments["q"].device
    own = take(arguments, torch.tensor(sequences, device=device), "block_tables", "seq_lens")
    bounds = torch.tensor([0, *(end - first for first, end in spans)], dtype=torch.int32, device=device)
    rows = torch.cat([torch.arange(first, end, device=device) for first, end in spans])
    lengths = own["seq_lens"] - torch.tensor(ahead, dtype=torch.int32, device=device)
    return own | {"q": arguments["q"][rows], "cu_seqlens_q": bounds.cumsum(0, dtype=torch.int32), "seq_lens": lengths}, rows


def in_parts(parts_of):
    """The way in which each part is a call; parts_of(spans) -> [(sequences, spans)]."""

    def way(call, arguments):
        out, whole = torch.zeros_like(arguments["q"], memory_format=torch.contiguous_format), spans_of(arguments)
        for sequences, spans in parts_of(whole):
            ahead = [whole[n][1] - end for n, (_, end) in zip(sequences, spans, strict=True)]
            own, rows = part(arguments, sequences, spans, ahead)
            out[rows] = call(own)["output"]
        return {"output": out}

    return way


def every(spans):
    return list(range(len(spans)))


def reordered(spans):
    order = every(spans)[1:] + every(spans)[:1]
    return [(order, [spans[n] for n in order])]


def alone(spans):
    return [([n], [span]) for n, span in enumerate(spans)]


def halves(spans):
    middles = [(first + end) // 2 for first, end in spans]
    first = [(first, middle) for (first, _), middle in zip(spans, middles, strict=True)]
    second = [(middle, end) for (_, end), middle in zip(spans, middles, strict=True)]
    return [(every(spans), first), (every(spans), second)]


def by_decoding(call, arguments):
    """Each new token decoded with the cache as long as it was then."""
    out = torch.zeros_like(arguments["q"], memory_format=torch.contiguous_format)
    decode, options = call.of("paged_attention_v2"), {n: v for n, v in arguments.items() if n != "cu_seqlens_q"}
    for n, (first, end) in enumerate(spans_of(arguments)):
        rows = torch.arange(first, end, device=out.device)
        lengths = (arguments["seq_lens"][n] - (end - 1 - rows)).int()
        tables = arguments["block_tables"][n].expand(len(rows), -1).contiguous()
        out[rows] = decode(options | {"q": arguments["q"][rows], "block_tables": tables, "seq_lens": lengths})["output"]
    return {"output": out}


NEW = {"new": (20, 1, 0, 9), "prefix": (0, 12, 5, 31)}
PREFILL = Roles(
    "paged_prefill",
    sizes=(NEW | SMALL, NEW | SMALL | FORMS[-1]),
    busy={"new": (150, 64, 3), "prefix": (0, 300, 70)} | SMALL,
    residues=[{"new": tuple(range(35)), "prefix": tuple(range(67, 32, -1)), "HQ": 2, "HK": 1, "D": 16, "BS": 8}]
    + [{"new": (9,), "prefix": (5,), "HQ": 2, "HK": 1, "D": d} for d in range(1, 67)],
    all_residues=[{"new": (19,), "prefix": (70,), "HQ": 2, "HK": 1, "D": d, "BS": 16} for d in range(1, 257)]
    + [{"new": tuple(range(n, n + 8)), "prefix": tuple(range(8)), "HQ": 2, "HK": 1, "D": 64} for n in range(0, 270, 8)],
    prepare=with_padding,
    irrelevant=nan_where_nobody_looks,
    routes=(
        *SHARED,
        Route("permutation", "sequences", in_parts(reordered)),
        Route("batch_invariance", "sequences", in_parts(alone)),
        Route("composition", "two_calls", in_parts(halves)),
        Route("composition", "decoding", by_decoding),
    ),
)

ROLES = [WRITE, DECODE, PREFILL]
