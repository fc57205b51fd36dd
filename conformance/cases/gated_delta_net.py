"""Cases of gdn_gating, gdn_prefill and gdn_decode: every clause of their contracts, and field bugs 1 to 7.

Field bug 4 (a state ignored) shows in every case here, as the examples continue earlier states. That a split prompt
equals a whole one, and decoding equals prefill, are properties (`conformance/properties`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from conformance import case
from conformance.case import FLOATS, example

NAN, INF = float("nan"), float("inf")
F32, BF16 = FLOATS[:1], FLOATS[2:]
HEADS = {"H": 1, "HV": 2, "K": 64, "V": 64}
SIZES = [{"K": k, "V": v} for k, v in ((64, 64), (128, 128), (256, 256), (64, 128), (256, 64))]
ODD_SIZES = [{"K": k, "V": v} for k, v in ((4, 5), (8, 6), (33, 40), (100, 72), (17, 129))]
RATIOS = [{"H": h, "HV": hv} for h, hv in ((1, 1), (2, 2), (2, 4), (1, 4), (3, 6))]


def table(op, kind, sizes=({},), change=None, dtypes=FLOATS, level="quick", raises=None):
    """Cases on the op's example arguments, after `change(arguments)`, which edits them or returns new ones."""
    base = {"gdn_gating": {}, "gdn_prefill": {"lengths": (37, 64), **HEADS}, "gdn_decode": HEADS}[op]

    def make(generator, device, dtype, **sizes):
        arguments = example(op, generator, device, dtype, **{**base, **sizes})
        return arguments | ((change and change(arguments)) or {})

    return case.table(op, kind, sizes, dtypes, level, make, raises=raises)


def gating(kind, *args, **kwargs):
    return table("gdn_gating", kind, *args, **kwargs)


def prefill(kind, *args, **kwargs):
    return table("gdn_prefill", kind, *args, **kwargs)


def decode(kind, *args, **kwargs):
    return table("gdn_decode", kind, *args, **kwargs)


def both(kind, *args, **kwargs):
    """Of prefill and decode."""
    return [*prefill(kind, *args, **kwargs), *decode(kind, *args, **kwargs)]


# ---- what a case changes in the example ------------------------------------------------------------------------------


def put(name, value, *at):
    """Writes a value into part of one argument."""

    def change(arguments):
        arguments[name][at if at else ...] = value

    return change


def use(**values):
    """Replaces arguments."""
    return lambda arguments: values


def each(*changes):
    """Several changes, one after the other."""

    def change(arguments):
        for one in changes:
            arguments |= one(arguments) or {}

    return change


def gate(value, tokens=slice(None)):
    return put("g", value, tokens)


def mixed_gates(arguments):
    """Resets, strong decay and positive gates side by side, also where chunks of 16, 32 and 64 begin and end."""
    g = arguments["g"]
    for tokens, value in (((0, 15, 31, 40, 63), -INF), ((1, 16, 47, 64), -27.0), ((2, 32), 3.0), ((3, 62), -1e30)):
        g[[t for t in tokens if t < len(g)]] = value


def nan_in_state(arguments):
    """One element of the first sequence's state: it loses that row of that head."""
    arguments["state"][arguments["state_indices"][0], 1, 3, 5] = NAN


def nan_in_unused_slots(arguments):
    state, used = arguments["state"], arguments["state_indices"].long()
    unused = torch.ones(len(state), dtype=torch.bool, device=state.device)
    unused[used[used >= 0]] = False
    state[unused] = NAN


def nan_where_not_continued(arguments):
    """What a slot holds does not matter to a sequence that starts from zero."""
    arguments["has_initial_state"][::2] = False
    arguments["state"][arguments["state_indices"][::2].long()] = NAN


def large_state(arguments):
    """Field bug 6: what the state holds grows beyond any limit of a half type."""
    arguments["state"].mul_(1e5)
    arguments["v"].mul_(500)
    for name in ("g", "beta"):
        if name in arguments:
            arguments[name].fill_(0 if name == "g" else 1)


def same_key(arguments):
    """Every token writes under one key: corrections undo each other in full."""
    arguments["k"][:] = arguments["k"][:1].clone()
    arguments["beta"].fill_(1)


def times(factor, *names):
    def change(arguments):
        for name in names:
            arguments[name].mul_(factor)

    return change


def unit_keys(arguments):
    """Without l2norm, keys of about unit length keep the state bounded."""
    arguments["k"].div_(arguments["k"].shape[-1] ** 0.5)
    return {"l2norm": False}


def state_in_act(arguments):
    return {"state": arguments["state"].to(arguments["q"].dtype)}


def padding_rows(null_index):
    """Rows of padding hold NaN, and name no slot, the null slot, or a slot that is not there."""

    def change(arguments):
        rows = [0, 3, -1]
        for name in ("q", "k", "v", "a", "b"):
            arguments[name][rows] = NAN
        arguments["state"][0] = NAN
        arguments["state_indices"][rows] = torch.tensor([-1, null_index, -1000], dtype=torch.int32).to(
            arguments["state_indices"]
        )
        return {"null_index": null_index}

    return change


def uncovered_tokens(arguments):
    """Tokens before the first sequence and after the last one, as a padded batch has them."""
    bounds = arguments["cu_seqlens"].clamp(min=3, max=len(arguments["q"]) - 5)
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name][:3] = arguments[name][-5:] = NAN
    return {"cu_seqlens": bounds}


# ---- layouts ---------------------------------------------------------------------------------------------------------


def contiguous(arguments):
    return {name: x.contiguous() for name, x in arguments.items() if isinstance(x, torch.Tensor)}


def interleaved(arguments):
    """q, k and v head by head in one projection: heads are strided too. For H = HV."""
    packed = torch.cat([arguments[name] for name in ("q", "k", "v")], dim=2)
    q, k, v = packed.split([arguments[name].shape[2] for name in ("q", "k", "v")], dim=2)
    return {"q": q, "k": k, "v": v}


def every_other_row(arguments):
    """Every tensor with a row per token lies in every other row of a larger one, NaN between; indices likewise."""
    changed = {}
    for name in arguments.keys() & {"q", "k", "v", "g", "beta", "a", "b"}:
        x = arguments[name]
        changed[name] = torch.stack([x, torch.full_like(x, NAN)], dim=1)[:, 0]
    if "state_indices" in arguments:
        indices = arguments["state_indices"]
        changed["state_indices"] = torch.stack([indices, torch.full_like(indices, -1)], dim=1)[:, 0]
    return changed


def misaligned(arguments, names=None):
    """Every floating-point tensor, or those named, starts one element into a buffer."""
    changed = {}
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and (names is None or name in names):
            buffer = x.new_full((x.numel() + 1,), NAN)
            changed[name] = buffer[1:].view(x.shape).copy_(x)
    return changed


def transposed(name):
    """The last two dimensions of one argument in the other order: right, or refused."""
    return lambda arguments: {name: arguments[name].transpose(-1, -2).contiguous().transpose(-1, -2)}


def shared_page(arguments):
    """The pool is a part of larger pages, between other tensors that hold NaN."""
    state = arguments["state"]
    page = state[0].numel()
    pages = state.new_full((len(state), 3 * page + 8), NAN)
    return {"state": pages[:, page : 2 * page].view(state.shape).copy_(state)}


# ---- the cases -------------------------------------------------------------------------------------------------------


def lengths(*given):
    return [{"lengths": one if isinstance(one, tuple) else (one,)} for one in given]


# More than a kernel will hold of what lies between two of its phases, thrice, where in the second turn one sequence ends
# and another begins. By many heads, as tokens make references slow.
PARTS = [{"lengths": (3500, 1800), "H": 64, "HV": 128, "K": 128, "V": 128}]
RAGGED = lengths((5, 0, 12), (0, 1, 64, 0, 33), (1,) * 9)

GATING = [
    *gating("sizes", [{"T": t, "HV": hv} for t, hv in ((1, 32), (7, 4), (65, 48), (130, 64))]),
    *gating("odd_heads", [{"T": 5, "HV": hv} for hv in (1, 3, 15, 17, 33)]),
    *gating("large_a", [{"T": 9}], put("a", 1000.0)),  # softplus by log(1 + exp) overflows
    *gating("small_a", [{"T": 9}], put("a", -1000.0)),
    *gating("large_b", [{"T": 9}], each(put("b", 1000.0, 1), put("b", -1000.0, 2))),
    *gating("wide_range", [{"T": 200}], times(30, "a", "b")),
    *gating("infinite", [{"T": 9}], each(*(put(n, v, t) for n in "ab" for t, v in enumerate((INF, -INF, NAN))))),
    *gating("no_decay", [{"T": 9}], put("A_log", -INF)),
    *gating("nan_parameters", [{"T": 9}], each(put("A_log", NAN, 1), put("dt_bias", NAN, 2))),
    *gating("contiguous", [{"T": 9}], contiguous),
    *gating("strided", [{"T": 9}], every_other_row),
    *gating("misaligned", [{"T": 9}], misaligned),
    *gating("transposed", [{"T": 9}], each(transposed("a"), transposed("b"))),
    *gating("empty", [{"T": 0}]),
    *gating("sizes_large", [{"T": 4099, "HV": 32}], level="standard"),
    *gating("shape", change=lambda x: {"b": x["b"][:-1]}, dtypes=F32, raises="b"),
    *gating("heads", change=lambda x: {"A_log": x["A_log"][1:]}, dtypes=F32, raises="A_log"),
    *gating("half_parameters", change=lambda x: {"dt_bias": x["dt_bias"].half()}, dtypes=F32, raises="dt_bias"),
    *gating("integers", change=use(a=torch.zeros(5, 4, dtype=torch.int32)), dtypes=F32, raises="a"),
]

PREFILL = [
    *prefill("residues", lengths(1, 2, 3, 31, 33, 63, 64, 65, 97, 129)),  # field bug 3
    *prefill("ragged", RAGGED),
    *prefill("empty", lengths((), (0,), (0, 0))),
    *prefill("empty_fresh", lengths((0, 4, 0)), put("has_initial_state", False)),
    *prefill("continued", lengths(40, (40, 7)), put("has_initial_state", True)),  # field bug 4
    *prefill("fresh", lengths(37), put("has_initial_state", False)),
    *prefill("fresh_over_nan", RAGGED, nan_where_not_continued),
    *prefill("uncovered_tokens", lengths((20, 20)), uncovered_tokens),
    *prefill("no_slot", lengths((5, 20)), put("state_indices", -1, 1)),
    *prefill("gate_positive", lengths(64, 130), gate(3.0)),  # field bug 1
    *prefill("gate_infinite", lengths(64), gate(INF)),
    *prefill("gate_strong", lengths(64, 97), gate(-27.0)),  # field bug 2
    *prefill("gate_reset", lengths(64, 70), gate(-INF)),
    *prefill("gate_huge", lengths(70), gate(-1e38)),
    *prefill("gate_weak", lengths(70), gate(-1e-7)),
    *prefill("gate_mixed", lengths(65, 97), mixed_gates),
    *prefill("decay_only", lengths(37), put("beta", 0)),
    *prefill("same_key", lengths(130), same_key),
    *prefill("beta_beyond_1", lengths(70), times(2, "beta")),  # overshoots: another eigenvalue than a sigmoid's beta has
    *prefill("beta_negative", lengths(40), times(-0.2, "beta")),
    *prefill("nan_value", [{"lengths": (70, 9), "HV": 4, "H": 2}], put("v", NAN, 5, 2)),  # field bug 5
    *prefill("nan_value_of_row", lengths(70), put("v", NAN, 5, 1, 3)),
    *prefill("nan_gate", lengths((70, 9)), put("g", NAN, 21, 1)),
    *prefill("nan_beta", lengths((70, 9)), put("beta", NAN, 21, 1)),
    *prefill("nan_key", lengths((70, 9)), put("k", NAN, 66, 0, 7)),
    *prefill("nan_query", lengths((70, 9)), put("q", NAN, 66, 0, 7)),
    *prefill("nan_state", lengths((70, 9)), nan_in_state),
    *prefill("sizes_large", [{"lengths": (300, 213), "H": 2, "HV": 4, "K": 128, "V": 128}], level="standard"),
    *prefill("long", lengths(3000), level="standard"),
    *prefill("long_without_decay", lengths(3000), gate(0.0), F32, "standard"),
    *(replace(one, device="cuda", memory=8 << 30) for one in prefill("parts", PARTS, dtypes=BF16, level="exhaustive")),
    *prefill("residues_ragged", lengths(*(tuple(range(i, i + 10)) for i in range(1, 131, 10))), level="standard"),
    *prefill("every_residue", lengths(*range(1, 131)), level="exhaustive"),
    *prefill("every_residue_mixed", lengths(*range(1, 131)), mixed_gates, F32, level="exhaustive"),
    *prefill("g_shape", change=lambda x: {"g": x["g"][1:]}, dtypes=F32, raises="g"),
    *prefill("half_gates", change=lambda x: {"g": x["g"].half()}, dtypes=F32, raises="g"),
    *prefill("beta_heads", change=lambda x: {"beta": x["beta"][:, 1:]}, dtypes=F32, raises="beta"),
    *prefill("long_bounds", change=lambda x: {"cu_seqlens": x["cu_seqlens"].long()}, dtypes=F32, raises="cu_seqlens"),
    *prefill("no_bounds", change=lambda x: {"cu_seqlens": x["cu_seqlens"][:0]}, dtypes=F32, raises="cu_seqlens"),
    *prefill(
        "integer_flags", change=lambda x: {"has_initial_state": x["has_initial_state"].int()}, dtypes=F32,
        raises="has_initial_state",
    ),
]

DECODE = [
    *decode("rows", [{"B": b} for b in (1, 2, 7, 33)]),
    *decode("empty", [{"B": 0}]),
    *decode("padding", [{"B": 7}], padding_rows(-1)),
    *decode("null_slot", [{"B": 7}], padding_rows(0)),
    *decode("only_padding", [{"B": 3}], put("state_indices", -1)),
    *decode("null_beyond_pool", [{"B": 3}], use(null_index=1000)),
    *decode("gate_strong", change=each(put("a", 27.0), put("A_log", 0.0))),
    *decode("gate_reset", change=put("A_log", INF)),
    *decode("no_decay", change=put("A_log", -INF)),
    *decode("large_a", change=put("a", 1000.0)),
    *decode("large_a_slow_decay", change=each(put("a", 1000.0), put("A_log", -7.0))),  # decay e^-1
    *decode("small_a", change=put("a", -1000.0)),
    *decode("large_b", change=each(put("b", 1000.0, 0), put("b", -1000.0, 1))),
    *decode("nan_a", change=put("a", NAN, 1, 0)),
    *decode("nan_b", change=put("b", NAN, 1, 0)),
    *decode("nan_value", change=put("v", NAN, 1, 1, 3)),
    *decode("nan_key", change=put("k", NAN, 1, 0, 7)),
    *decode("nan_query", change=put("q", NAN, 1, 0, 7)),
    *decode("nan_state", change=nan_in_state),
    *decode("sizes_large", [{"B": 32, "H": 4, "HV": 8, "K": 128, "V": 128}], level="standard"),
    *decode("a_dtype", change=lambda x: {"a": x["a"].double()}, dtypes=F32, raises="a"),
    *decode("heads", change=lambda x: {"A_log": x["A_log"][1:]}, dtypes=F32, raises="A_log"),
]

# cuda/gdn_decode.cu has K of 128: a block takes 16 rows of a head's state in one visit; in two (V of whole 32s) and four
# (whole 64s) from 4 and 24 blocks of one visit per multiprocessor on: with 132, from 528 and 3168. HV 4, V 64 come to 16
# blocks per row of the batch, HV 8, V 96 to 48 (never four visits); V of 48 and 80 are no whole 32s, V of 72 no whole 16s.
BIG = {"H": 2, "HV": 4, "K": 128, "V": 64}
VISITS = [{"B": b} | BIG for b in (5, 33, 198)]
GRID = [{"B": b, "HV": hv, "H": 1, "K": 128, "V": 16} for b, hv in ((65535, 1), (65536, 1), (1, 65536))]  # along y and z


def in_turn(generator, device, dtype, B, HV, **sizes):
    """Rows or heads that are 499 in turn, as to draw so many would take longest; slots for 8 rows at either end."""
    few = example("gdn_decode", generator, device, dtype, B=min(B, 499), HV=min(HV, 499), **sizes)
    row, head = (torch.arange(count, device=device) for count in (B, HV))
    rows, heads = row % 499, head % 499
    full = {name: few[name][rows[:, None], heads] for name in ("v", "a", "b")} | {"state": few["state"][:16][:, heads]}
    full |= {name: few[name][rows] for name in ("q", "k")} | {name: few[name][heads] for name in ("A_log", "dt_bias")}
    return full | {"state_indices": torch.where(row < 8, row, torch.where(row < B - 8, -1, row - B + 16)).int()}


def mostly_padding(arguments):
    """Slots for 8 rows at either end, in a pool of these alone: the judge's work grows with the pool."""
    indices = arguments["state_indices"]
    indices[8:-8] = -1
    used = indices >= 0
    indices[used] = 1 + indices[used].argsort().argsort().int()
    return {"state": arguments["state"][: int(used.sum()) + 2]}


def visits(kind, change=None, sizes=VISITS, dtypes=BF16):
    return decode(kind, sizes, each(mostly_padding, *[change] * bool(change)), dtypes, level="standard")


DECODE += [
    *decode("visits", [{"B": b} | BIG for b in (32, 33)], level="standard"),
    *decode("visits", [{"B": b} | BIG for b in (197, 198)], dtypes=BF16, level="exhaustive"),
    *visits("visits_mostly_padding", sizes=[{"B": b} | BIG for b in (197, 198)], dtypes=FLOATS),
    *visits("visits_of_96", sizes=[{"B": b} | BIG | {"HV": 8, "V": 96} for b in (11, 66)]),
    *visits("visits_odd", sizes=[{"B": 140} | BIG | {"HV": 8, "V": v} for v in (48, 80)]),
    *visits("visits_small", sizes=[{"B": 3} | BIG | {"V": v} for v in (16, 32, 72)], dtypes=FLOATS),
    *visits("visits_padding", padding_rows(-1)),
    *visits("visits_null_slot", padding_rows(0)),
    *visits("visits_state_in_act", state_in_act, dtypes=FLOATS[1:]),
    *visits("visits_every_other_row", every_other_row),
    *visits("visits_nan_state", nan_in_state),
    *visits("visits_nan_query", put("q", NAN, 1, 0, 7)),
    *visits("visits_nan_key", put("k", NAN, 1, 0, 7)),
    *visits("visits_nan_value", put("v", NAN, 1, 1, 3)),
    *visits("visits_gate_reset", put("A_log", INF)),
    *visits("visits_misaligned", lambda x: misaligned(x, ("q", "k")), dtypes=FLOATS),
    *case.table("gdn_decode", "grid_rows", GRID[:2], BF16, "standard", in_turn),
    *(replace(one, device="cuda") for one in
      case.table("gdn_decode", "grid_heads", GRID[2:], BF16, "exhaustive", in_turn, memory=12 << 30)),
]

BOTH = [
    *both("sizes", [size | {"HV": 2, "H": 1} for size in SIZES]),
    *both("odd_sizes", ODD_SIZES),
    *both("heads", RATIOS),
    *both("state_in_act", change=state_in_act),
    *both("unused_slots", change=nan_in_unused_slots),
    *both("large_state", change=large_state),
    *both("large_keys", change=times(100, "q", "k")),
    *both("tiny_keys", change=times(1e-3, "q", "k")),  # the epsilon of l2norm counts
    *both("zero_keys", change=times(0, "q", "k")),
    *both("no_l2norm", change=unit_keys),
    *both("scale", change=use(scale=0.37)),
    *both("scale_negative", change=use(scale=-0.37)),
    *both("scale_0", change=use(scale=0.0)),
    *both("contiguous", change=contiguous),
    *both("interleaved", [{"H": 2, "HV": 2, "V": 32}], interleaved),
    *both("every_other_row", change=every_other_row),
    *both("misaligned", change=misaligned),
    *both("shared_page", change=shared_page),
    *both("transposed_state", change=transposed("state")),
    *both("transposed_query", change=transposed("q")),
    *both("transposed_value", change=transposed("v")),
    *both("k_shape", change=lambda x: {"k": x["k"][..., 1:]}, dtypes=F32, raises="k"),
    *both("k_dtype", change=lambda x: {"k": x["k"].half()}, dtypes=F32, raises="k"),
    *both("v_tokens", change=lambda x: {"v": x["v"][1:]}, dtypes=F32, raises="v"),
    *both("v_heads", change=lambda x: {n: x[n].repeat(1, 3, 1) for n in "qk"}, dtypes=F32, raises="v"),
    *both("state_shape", change=lambda x: {"state": x["state"][..., 1:]}, dtypes=F32, raises="state"),
    *both("state_dtype", change=lambda x: {"state": x["state"].half()}, dtypes=F32, raises="state"),
    *both(
        "long_indices", change=lambda x: {"state_indices": x["state_indices"].long()}, dtypes=F32,
        raises="state_indices",
    ),
    *both(
        "indices_shape", change=lambda x: {"state_indices": x["state_indices"][1:]}, dtypes=F32,
        raises="state_indices",
    ),
    *both("no_state", change=use(state=None), dtypes=F32, raises="state"),
    *both("scale_text", change=use(scale="1"), dtypes=F32, raises="scale"),
]

CASES = [*GATING, *PREFILL, *DECODE, *BOTH]
