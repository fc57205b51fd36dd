"""The gated delta rule's references: the recurrence by hand, the chunked form equal to it, split calls equal to one."""

import math

import pytest
import torch

from ops_reference.gated_delta_net import gdn_decode, gdn_gating, gdn_prefill
from ops_reference.gated_delta_net_chunked import gdn_prefill_chunked

F64 = torch.float64
RESIDUES = range(1, 34)


def example(seed=0, dtype=F64, **sizes):
    sizes = {"H": 1, "HV": 2, "K": 8, "V": 6, **sizes}
    return gdn_prefill.example(torch.Generator().manual_seed(seed), "cpu", dtype, **sizes)


def run(function, arguments, **more):
    """Output and state after the call, on a copy of the state."""
    arguments = arguments | {"state": arguments["state"].clone()} | more
    return function(**arguments), arguments["state"]


def check_chunked(arguments, chunk=16):
    wanted, wanted_state = run(gdn_prefill.reference, arguments)
    got, got_state = run(gdn_prefill_chunked, arguments, chunk=chunk)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11, equal_nan=True)
    torch.testing.assert_close(got_state, wanted_state, rtol=1e-11, atol=1e-11, equal_nan=True)


def tokens(arguments, first, last):
    """The same call for tokens first to last of its only sequence."""
    cut = {name: arguments[name][first:last] for name in ("q", "k", "v", "g", "beta")}
    return arguments | cut | {"cu_seqlens": torch.tensor([0, last - first], dtype=torch.int32)}


def test_two_tokens_worked_out_by_hand():
    # S0 = [[1, 2]]; token 1: decay 1/2 -> [[.5, 1]], S k = .5, correction .5 (3 - .5) = 1.25 -> [[1.75, 1]];
    # token 2: no decay, S k = 1, correction 1 (5 - 1) = 4 -> [[1.75, 5]]
    state = torch.tensor([[[[1.0, 2.0]]]], dtype=F64)
    o = gdn_prefill.reference(
        q=torch.tensor([[[1.0, 1.0]], [[2.0, 1.0]]], dtype=F64),
        k=torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=F64),
        v=torch.tensor([[[3.0]], [[5.0]]], dtype=F64),
        g=torch.tensor([[math.log(0.5)], [0.0]], dtype=F64),
        beta=torch.tensor([[0.5], [1.0]], dtype=F64),
        state=state,
        state_indices=torch.tensor([0], dtype=torch.int32),
        has_initial_state=torch.tensor([True]),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        scale=2.0,
        l2norm=False,
    )
    torch.testing.assert_close(o.flatten(), torch.tensor([5.5, 17.0], dtype=F64))
    torch.testing.assert_close(state.flatten(), torch.tensor([1.75, 5.0], dtype=F64))


def test_gates_by_hand():
    a, b = torch.tensor([[0.0, 1000.0, -1000.0]]), torch.tensor([[0.0, 1000.0, -1000.0]])
    g, beta = gdn_gating.reference(a, b, torch.tensor([math.log(2.0), 0.0, 0.0]), torch.zeros(3))
    torch.testing.assert_close(g, torch.tensor([[-2 * math.log(2.0), -1000.0, 0.0]]))
    torch.testing.assert_close(beta, torch.tensor([[0.5, 1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_l2norm_is_of_float32_values(dtype):
    arguments = example(dtype=dtype, lengths=(4,))
    large = arguments | {name: arguments[name] * 1024 for name in ("q", "k")}
    torch.testing.assert_close(run(gdn_prefill.reference, large)[0], run(gdn_prefill.reference, arguments)[0])


@pytest.mark.parametrize("length", RESIDUES)
def test_chunked_equals_recurrence_at_every_residue(length):
    check_chunked(example(seed=length, lengths=(length,)))


def test_chunked_equals_recurrence_on_ragged_batches():
    check_chunked(example(lengths=(0, 1, 16, 0, 33, 7, 64)))


@pytest.mark.parametrize("gate", [0.0, 3.0, -1e-6, -27.0, -1e4, -1e38, -math.inf])
def test_chunked_equals_recurrence_under_extreme_gates(gate):
    arguments = example(lengths=(37, 16))
    arguments["g"] = torch.full_like(arguments["g"], gate)
    check_chunked(arguments)
    arguments = example(lengths=(37, 16))
    arguments["g"][[3, 4, 15, 16, 20]] = gate
    check_chunked(arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
def test_chunked_puts_nan_where_the_recurrence_does(name):
    arguments = example(lengths=(40, 9))
    if name == "state":
        arguments["state"][arguments["state_indices"][0], 1, 2, 3] = math.nan
    else:
        arguments[name][21, 0, ...] = math.nan
    check_chunked(arguments)


def test_chunked_keeps_one_nan_value_in_its_row():
    arguments = example(lengths=(40,))
    arguments["v"][5, 1, 3] = math.nan
    check_chunked(arguments)
    o, _ = run(gdn_prefill_chunked, arguments)
    assert o.isnan().nonzero().tolist() == [[t, 1, 3] for t in range(5, 40)]


@pytest.mark.parametrize("function", [gdn_prefill.reference, gdn_prefill_chunked])
@pytest.mark.parametrize("cut", [0, 1, 15, 16, 60, 99, 100])
def test_split_call_equals_whole_call(function, cut):
    arguments = example(lengths=(100,))
    whole, whole_state = run(function, arguments)
    first, state = run(function, tokens(arguments, 0, cut))
    rest = tokens(arguments, cut, 100) | {"state": state, "has_initial_state": torch.tensor([True])}
    second, state = run(function, rest)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(state, whole_state)


def test_decode_token_by_token_equals_prefill():
    arguments = example(lengths=(20,))
    gates = gdn_gating.example(torch.Generator().manual_seed(1), "cpu", F64, T=20, HV=2)
    arguments["g"], arguments["beta"] = gdn_gating.reference(**gates)
    whole, whole_state = run(gdn_prefill.reference, arguments)
    state = arguments["state"].clone()
    rows = {name: arguments[name] for name in ("q", "k", "v")} | {name: gates[name] for name in ("a", "b")}
    fixed = {name: gates[name] for name in ("A_log", "dt_bias")} | {"state_indices": arguments["state_indices"]}
    steps = [
        gdn_decode.reference(**{name: x[t : t + 1] for name, x in rows.items()}, **fixed, state=state)
        for t in range(20)
    ]
    torch.testing.assert_close(torch.cat(steps), whole)
    torch.testing.assert_close(state, whole_state)


def test_decode_leaves_padding_rows_alone():
    arguments = gdn_decode.example(torch.Generator().manual_seed(0), "cpu", torch.float32, B=4)
    arguments["state_indices"] = torch.tensor([-1, 2, 0, -7], dtype=torch.int32)
    arguments["v"][[0, 2, 3]] = math.nan
    before = arguments["state"].clone()
    o = gdn_decode.reference(**arguments, null_index=0)
    assert not o[[0, 2, 3]].any() and o[1].isfinite().all()
    changed = (arguments["state"] != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [2]


def test_sequence_without_tokens_ends_where_it_starts():
    arguments = example(lengths=(0, 0))
    arguments["has_initial_state"] = torch.tensor([True, False])
    kept, zeroed = arguments["state_indices"].tolist()
    before = arguments["state"].clone()
    _, state = run(gdn_prefill.reference, arguments)
    assert torch.equal(state[kept], before[kept])
    assert not state[zeroed].any()


def test_negative_index_drops_the_state_and_uncovered_tokens_are_zero():
    arguments = example(lengths=(6,))
    arguments["state_indices"] = torch.tensor([-1], dtype=torch.int32)
    arguments["cu_seqlens"] = torch.tensor([1, 5], dtype=torch.int32)
    o, state = run(gdn_prefill.reference, arguments)
    assert torch.equal(state, arguments["state"])
    assert o.flatten(1).any(1).tolist() == [False, True, True, True, True, False]
