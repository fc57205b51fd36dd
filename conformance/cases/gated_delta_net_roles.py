"""What the properties have to be told of gdn_gating, gdn_prefill and gdn_decode."""

from __future__ import annotations

from itertools import pairwise

import torch

from conformance.case import FLOATS
from conformance.cases.gated_delta_net import BIG, INF, NAN, nan_in_unused_slots
from conformance.properties.roles import Roles, Route, back, rows_alone, rows_shuffled, shuffled, take

HEADS = {"H": 1, "HV": 2, "K": 64, "V": 64}
TINY = {"H": 1, "HV": 1, "K": 16, "V": 16}
BF16 = FLOATS[2:]
WIDTHS = range(16, 82)  # of a key. A row of the state is as long; much shorter ones show too little noise to be judged by
GROUPS = {"H": 2, "HV": 4, "K": 32, "V": 32}


def op_itself(call, arguments):
    return call(arguments)


# ---- gdn_gating ------------------------------------------------------------------------------------------------------


def heads_of_gates(call, arguments):
    order = shuffled(len(arguments["A_log"]), arguments["a"])
    columns = {name: arguments[name][:, order] for name in ("a", "b")}
    results = call(take(arguments, order, "A_log", "dt_bias") | columns)
    return {name: result[:, order.argsort()] for name, result in results.items()}


def complement(call, arguments):
    """sigmoid(b) = 1 - sigmoid(-b)."""
    results = call(arguments | {"b": -arguments["b"]})
    return results | {"output[1]": 1 - results["output[1]"]}


GATING = Roles(
    "gdn_gating",
    sizes=({"T": 9, "HV": 6},),
    busy={"T": 1500, "HV": 32},
    residues=[{"T": 1 + hv % 5, "HV": hv} for hv in range(1, 131)],
    routes=(
        Route("permutation", "tokens", rows_shuffled("a", "b")),
        Route("permutation", "heads", heads_of_gates),
        Route("batch_invariance", "tokens", rows_alone("a", "b")),
        Route("identities", "sigmoid_of_minus_b", complement),
    ),
)

# ---- gdn_prefill -----------------------------------------------------------------------------------------------------

TOKENS = ("q", "k", "v", "g", "beta")
SEQUENCES = ("state_indices", "has_initial_state")


def with_padding(arguments):
    """Tokens that belong to no sequence at either end; the last of several sequences has no slot."""
    bounds = arguments["cu_seqlens"].clamp(min=2, max=len(arguments["q"]) - 3)
    arguments["state_indices"][1:][-1:] = -1
    return {"cu_seqlens": bounds}


def nan_beyond_sequences(arguments):
    """Tokens outside every sequence, slots that are nobody's, and slots of those who start from zero."""
    first, last = arguments["cu_seqlens"][[0, -1]].tolist()
    for name in TOKENS:
        arguments[name][:first] = arguments[name][last:] = NAN
    nan_in_unused_slots(arguments)
    fresh = arguments["state_indices"][~arguments["has_initial_state"]]
    arguments["state"][fresh[fresh >= 0].long()] = NAN


def part(arguments, sequences, spans, fresh=False):
    """Arguments of a call with spans (first, end) of tokens of these sequences; fresh: forget what came before."""
    device = arguments["q"].device
    tokens = [torch.arange(first, end, device=device) for first, end in spans]
    bounds = torch.tensor([0, *(len(span) for span in tokens)], dtype=torch.int32, device=device)
    own = take(arguments, torch.tensor(sequences, dtype=torch.long, device=device), *SEQUENCES)
    own = take(own, torch.cat(tokens), *TOKENS)
    own["has_initial_state"] = own["has_initial_state"] & (not fresh)
    return own | {"cu_seqlens": bounds.cumsum(0, dtype=torch.int32)}


def spans_of(arguments):
    bounds = arguments["cu_seqlens"].tolist()
    return list(pairwise(bounds))


def placed(arguments, calls):
    """Whole results from those of calls on [(spans, results)]; tokens outside have output zero."""
    out = torch.zeros_like(arguments["v"], memory_format=torch.contiguous_format)
    for spans, results in calls:
        rows = torch.cat([torch.arange(first, end) for first, end in spans])
        out[rows.to(out.device)] = results["output"]
    return {"output": out, "state": arguments["state"]}


def sequences_in_another_order(call, arguments):
    spans = spans_of(arguments)
    order = shuffled(len(spans), arguments["q"]).tolist()
    spans = [spans[n] for n in order]
    return placed(arguments, [(spans, call(part(arguments, order, spans)))])


def sequences_alone(call, arguments):
    spans = spans_of(arguments)
    return placed(arguments, [([span], call(part(arguments, [n], [span]))) for n, span in enumerate(spans)])


def cut(pieces):
    """The way in which every sequence comes in that many calls, the state carried through the pool."""

    def way(call, arguments):
        spans, calls = spans_of(arguments), []
        for piece in range(pieces):
            own = [(f + (e - f) * piece // pieces, f + (e - f) * (piece + 1) // pieces) for f, e in spans]
            for n in (arguments["state_indices"] < 0).nonzero().flatten().tolist():  # has no slot to carry its state in
                own[n] = (spans[n][1] if piece else spans[n][0], spans[n][1])
            step = part(arguments, range(len(spans)), own)
            if piece:
                step["has_initial_state"] = torch.ones_like(step["has_initial_state"])
            calls.append((own, call(step)))
        return placed(arguments, calls)

    return way


def token_by_token(call, arguments):
    return cut(max(end - first for first, end in spans_of(arguments)))(call, arguments)


def slots_in_another_order(call, arguments):
    """The pool's slots change places, and with them the indices."""
    order = shuffled(len(arguments["state"]), arguments["q"])
    indices = arguments["state_indices"]
    renamed = order.argsort()[indices.clamp(min=0).long()].int().where(indices >= 0, indices)
    results = call(arguments | {"state": arguments["state"][order], "state_indices": renamed} | null_of(arguments, order))
    return back(results, order, "state")


def null_of(arguments, order):
    null = arguments.get("null_index", -1)
    return {"null_index": int(order.argsort()[null])} if null >= 0 else {}


def heads_in_another_order(call, arguments):
    """Groups of value heads change places together with their query/key head."""
    heads, group = arguments["q"].shape[1], arguments["v"].shape[1] // arguments["q"].shape[1]
    order = shuffled(heads, arguments["q"])
    values = (order[:, None] * group + torch.arange(group, device=order.device)).flatten()
    changed = {name: arguments[name][:, order] for name in ("q", "k")}
    changed |= {n: arguments[n][:, values] for n in ("v", "g", "beta", "a", "b", "state") if n in arguments}
    results = call(take(arguments, values, *(n for n in ("A_log", "dt_bias") if n in arguments)) | changed)
    return {name: result[:, values.argsort()] for name, result in results.items()}


def no_writing(arguments):
    arguments["beta"].zero_()


def decay_only(call, arguments):
    """beta = 0: S_t = exp(g_1 + ... + g_t) S_0, by formula."""
    state, calls = arguments["state"], []
    q = normal(arguments["q"]).repeat_interleave(arguments["v"].shape[1] // arguments["q"].shape[1], dim=1)
    old = state.clone()
    for n, (first, end) in enumerate(spans_of(arguments)):
        slot = int(arguments["state_indices"][n])
        start = old[slot].to(q.dtype) if slot >= 0 and arguments["has_initial_state"][n] else 0 * old[0].to(q.dtype)
        decays = arguments["g"][first:end].clamp(max=0).cumsum(0).exp()
        read = torch.einsum("hvk,thk->thv", start, q[first:end]) * decays[..., None] * q.shape[-1] ** -0.5
        calls.append(([(first, end)], {"output": read.to(arguments["v"].dtype)}))
        if slot >= 0:
            state[slot] = start * (decays[-1] if end > first else torch.ones_like(old[0, :, 0, 0]))[:, None, None]
    return placed(arguments, calls)


def normal(x):
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


RESET = 20  # tokens before it


def reset(arguments):
    first, _ = spans_of(arguments)[0]
    arguments["g"][first + RESET] = -INF


def from_there_on(call, arguments):
    """g = -inf forgets: from that token on, the sequence is a new one."""
    spans = spans_of(arguments)
    middle = spans[0][0] + RESET
    heads, tails = [(spans[0][0], middle), *spans[1:]], [(middle, spans[0][1])]
    calls = [(heads, call(part(arguments, range(len(spans)), heads)))]
    return placed(arguments, [*calls, (tails, call(part(arguments, [0], tails, fresh=True)))])


CARRIED = {"lengths": (1000, 300)} | TINY
PREFILL = Roles(
    "gdn_prefill",
    sizes=({"lengths": (37, 0, 5, 9)} | HEADS,),
    busy={"lengths": (200, 64, 37), "H": 4, "HV": 8, "K": 32, "V": 32},
    residues=[{"lengths": tuple(range(1, 68))} | TINY, {"lengths": tuple(range(35))} | HEADS]
    + [{"lengths": (12,), "K": k, "V": 83 - k, "H": 1, "HV": 1} for k in WIDTHS],
    all_residues=[{"lengths": tuple(range(n, n + 10))} | HEADS for n in range(1, 260, 10)],
    prepare=with_padding,
    irrelevant=nan_beyond_sequences,
    routes=(
        Route("permutation", "sequences", sequences_in_another_order),
        Route("permutation", "slots", slots_in_another_order),
        Route("permutation", "heads", heads_in_another_order, sizes={"lengths": (20, 9)} | GROUPS),
        Route("batch_invariance", "sequences", sequences_alone),
        Route("composition", "two_calls", cut(2)),
        Route("composition", "two_calls_state_in_act", cut(2), prepare=lambda a: {"state": a["state"].to(a["q"].dtype)},
              dtypes=FLOATS[1:]),
        Route("composition", "token_by_token", token_by_token),
        Route("identities", "beta_0_decays", op_itself, whole=decay_only, prepare=no_writing),
        Route("identities", "reset_forgets", from_there_on, prepare=reset),
        Route("long_horizon", "many_calls", cut(20), sizes=CARRIED),
        Route("long_horizon", "thousands", cut(60), sizes=CARRIED | {"lengths": (6000,)}, level="standard"),
    ),
)  # fmt: skip

# ---- gdn_decode ------------------------------------------------------------------------------------------------------

ROWS = ("q", "k", "v", "a", "b", "state_indices")


def padding_rows(arguments):
    """A row without a slot, one with the null slot."""
    arguments["state_indices"][1:3] = torch.tensor([-1, 0], dtype=torch.int32)
    return {"null_index": 0}


def nan_in_padding(arguments):
    padding = arguments["state_indices"] <= 0
    for name in ROWS[:5]:
        arguments[name][padding] = NAN
    nan_in_unused_slots(arguments)
    arguments["state"][0] = NAN


def rows_one_by_one(call, arguments):
    rows = [call(take(arguments, slice(n, n + 1), *ROWS))["output"] for n in range(len(arguments["q"]))]
    return {"output": torch.cat(rows), "state": arguments["state"]}


def rows_in_another_order(call, arguments):
    order = shuffled(len(arguments["q"]), arguments["q"])
    return back(call(take(arguments, order, *ROWS)), order, "output")


def gates_and_prefill(call, arguments):
    """Gates by gdn_gating, and a prefill of one token per row."""
    g, beta = call.of("gdn_gating")({name: arguments[name] for name in ("a", "b", "A_log", "dt_bias")}).values()
    indices = arguments["state_indices"]
    slots = indices.where(indices != arguments["null_index"], -1)
    bounds = torch.arange(len(indices) + 1, dtype=torch.int32, device=indices.device)
    core = {name: arguments[name] for name in ("q", "k", "v", "state")} | {"g": g, "beta": beta}
    each = {"state_indices": slots, "has_initial_state": torch.ones_like(slots, dtype=torch.bool), "cu_seqlens": bounds}
    results = call.of("gdn_prefill")(core | each)
    results["output"][slots < 0] = 0  # padding has no token there, and here a token without a state
    return results


def decayed_only(call, arguments):
    """b = -inf is beta = 0: S <- exp(g) S, o = scale S q."""
    x = arguments["a"].to(arguments["A_log"].dtype) + arguments["dt_bias"]
    decay = (-arguments["A_log"].exp() * torch.logaddexp(x, torch.zeros_like(x))).exp()
    q = normal(arguments["q"]).repeat_interleave(arguments["v"].shape[1] // arguments["q"].shape[1], dim=1)
    out = torch.zeros_like(arguments["v"], memory_format=torch.contiguous_format)
    for row, slot in enumerate(arguments["state_indices"].tolist()):
        if slot > 0:
            s = arguments["state"][slot] * decay[row, :, None, None]
            out[row] = (torch.einsum("hvk,hk->hv", s, q[row]) * q.shape[-1] ** -0.5).to(out.dtype)
            arguments["state"][slot] = s
    return {"output": out, "state": arguments["state"]}


def from_zero(call, arguments):
    """exp(A_log) = inf is g = -inf: what the slots held is forgotten."""
    used = arguments["state_indices"][arguments["state_indices"] > 0].long()
    arguments["state"][used] = 0
    return call(arguments | {"A_log": torch.zeros_like(arguments["A_log"])})


def put(name, value):
    def change(arguments):
        arguments[name].fill_(value)

    return change


STEPS = 24  # rows of the example that are played again and again


def many_steps(count):
    """The way in which one slot decodes `count` tokens: the rows of the example in turn. All outputs, the final state."""

    def way(call, arguments):
        rows = [take(arguments, slice(n, n + 1), *ROWS) for n in range(STEPS)]
        slot = {"state_indices": rows[0]["state_indices"]}
        outputs = [call(rows[step % STEPS] | slot)["output"] for step in range(count)]
        return {"output": torch.cat(outputs), "state": arguments["state"]}

    return way


def horizon(name, count, level, dtypes=FLOATS, **sizes):
    """Slow decay and weak writes, so that a state is what thousands of tokens made it."""
    way, size = many_steps(count), {"B": STEPS} | TINY | sizes
    return Route("long_horizon", name, way, whole=way, sizes=size, dtypes=dtypes, level=level, prepare=put("A_log", -3.0))


DECODE = Roles(
    "gdn_decode",
    sizes=({"B": 5} | HEADS,),
    busy={"B": 33} | BIG,  # two visits
    residues=[{"B": 3 + k % 9, "K": k, "V": 83 - k, "H": 1, "HV": 2} for k in WIDTHS],
    all_residues=[{"B": 3, "K": k, "V": 272 - k, "H": 1, "HV": 1} for k in range(16, 257)],
    prepare=padding_rows,
    irrelevant=nan_in_padding,
    routes=(
        Route("permutation", "rows", rows_in_another_order),
        Route("permutation", "slots", slots_in_another_order),
        Route("permutation", "heads", heads_in_another_order, sizes={"B": 4} | GROUPS),
        Route("batch_invariance", "rows", rows_one_by_one),
        Route("composition", "gates_and_prefill", gates_and_prefill),
        Route("identities", "beta_0_decays", op_itself, whole=decayed_only, prepare=put("b", -INF)),
        Route("identities", "reset_forgets", from_zero, prepare=put("A_log", INF)),
        horizon("steps", 500, "quick"),
        horizon("thousands_of_steps", 5000, "standard"),
        horizon("steps_of_128", 300, "standard", BF16, K=128, V=128),
        horizon("thousands_of_steps_state_in_act", 3000, "standard", BF16, state_dtype=BF16[0]),
    ),
)

ROLES = [GATING, PREFILL, DECODE]
