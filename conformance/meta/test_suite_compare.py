"""The error budget acquits right results and convicts wrong ones, over many seeds."""

import pytest
import torch

from conformance.compare import Evaluation, by_budget, compare_topk, ulp_of, within_budget
from conformance.run import describe
from ops_reference.router import topk_softmax

SEEDS = range(100)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def three_ways(seed, dtype, rounded=False, rows=4, inner=64, columns=96):
    """(actual, exact, plain) of 1.7 x @ w^T: actual sums in another order than plain; `rounded` rounds 1.7 x first."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    w = torch.randn(columns, inner, generator=generator).to(dtype)
    exact = (x.double() * 1.7) @ w.double().T
    plain = ((x.float() * 1.7) @ w.float().T).to(dtype)
    inside = (x.float() * 1.7).to(dtype if rounded else torch.float32).float()
    half = inner // 2
    actual = (inside[:, :half] @ w.float().T[:half] + inside[:, half:] @ w.float().T[half:]).to(dtype)
    return actual, exact, plain


def verdict(actual, exact, plain, rounded=0):
    return within_budget("output", actual, exact, plain, rounded=rounded).kind


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_summation_is_right(dtype):
    assert [verdict(*three_ways(seed, dtype)) for seed in SEEDS] == [""] * len(SEEDS)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounding_an_intermediate_to_the_activation_dtype_is_right(dtype):
    assert [verdict(*three_ways(seed, dtype, rounded=True), rounded=1) for seed in SEEDS] == [""] * len(SEEDS)


def one_row_one_percent_off(actual):
    actual[1] *= 1.01


def last_element_dropped(actual):
    actual[-1, -1] = 0


def a_pair_of_heads_swapped(actual):
    heads = actual[1].view(6, 16)
    heads[[2, 3]] = heads[[3, 2]].clone()


def one_nan(actual):
    actual[2, 5] = float("nan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [one_row_one_percent_off, last_element_dropped, a_pair_of_heads_swapped, one_nan])
def test_a_wrong_result_is_convicted_in_every_seed(fault, dtype):
    for seed in SEEDS:
        actual, exact, plain = three_ways(seed, dtype)
        fault(actual)
        assert verdict(actual, exact, plain), f"seed {seed}"


def test_the_worst_element_is_named_with_its_error_in_ulp():
    actual, exact, plain = three_ways(0, torch.float16)
    actual[2, 7] += 40 * ulp_of(exact, torch.float16)[2, 7].half()
    finding = within_budget("output", actual, exact, plain)
    assert (finding.kind, finding.at) == ("error_budget", (2, 7))
    assert finding.ulp == pytest.approx(40, abs=1)


def test_the_element_farthest_in_ulp_and_the_error_of_the_row_are_told():
    """The last row is convicted; of the first, one element is farther off in ulp, as it is small."""
    exact = torch.tensor([[1.0, 2.0**-20], [1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    actual = (exact + torch.tensor([[0, 2.0**-32], [0, 0], [0.03, 0.04]])).float()
    finding = within_budget("output", actual, exact, exact.float())
    assert (finding.at, finding.row_error) == ((2, 1), pytest.approx(0.05 / 2**0.5, rel=1e-5))
    assert (finding.worst_at, finding.worst_ulp) == (finding.at, finding.ulp)
    plain = exact.float() + torch.tensor([[0.0, 1e-3], [0.0, 0.0], [0.0, 0.0]])
    actual[0, 1] = 1.5
    finding = within_budget("output", actual, exact, plain)
    assert (finding.at, finding.worst_at, finding.ulp < 1e6 < finding.worst_ulp) == ((2, 1), (0, 1), True)
    told = f"; its row errs by 0.0354 of its rms, the worst element by {finding.worst_ulp:.3g} ulp, at [0, 1]"
    assert told in describe(finding)


def test_of_a_row_of_zeros_any_error_is_all_of_it():
    finding = within_budget("output", torch.ones(1, 2), torch.zeros(1, 2).double(), torch.zeros(1, 2))
    assert finding.row_error == float("inf")


def test_rows_are_judged_at_their_own_scale():
    actual, exact, plain = three_ways(0, torch.float32)
    small = torch.tensor([1.0, 1e-12, 1.0, 1.0])[:, None]
    actual, exact, plain = actual * small, exact * small, (plain * small)
    assert verdict(actual, exact, plain) == ""
    actual[1] *= 1.01
    assert verdict(actual, exact, plain) == "row_scale"


def test_cancellation_is_no_fault_of_float32():
    x = torch.tensor([[1e4, 1.0, -1e4, 1e-3]])
    exact = x.double().sum(-1, keepdim=True)
    lucky, unlucky = exact.float(), exact.float() + 2e-4  # an ulp of 1e4 is 1e-3

    def of(actual, move):
        return Evaluation("sum", {}, {"output": actual}, {"output": exact}, {"output": lucky}, move)

    moved = x.double() * (1 + torch.finfo(torch.float32).eps * torch.tensor([1, 1, -1, 1]))
    assert by_budget(of(unlucky, None))[0].kind
    assert not by_budget(of(unlucky, lambda draw: {"output": moved.sum(-1, keepdim=True)}))[0].kind


def test_keys_that_are_summed_one_by_one_are_right_and_one_less_is_wrong():
    def kind(op, keys, values, actual):
        means = {"output": (values.double() / keys).sum(0, keepdim=True)}  # of equal weights
        plain = {"output": (values / keys).sum(0, keepdim=True)}
        evaluation = Evaluation(op, {"seq_lens": torch.tensor([3, keys])}, {"output": actual[None]}, means, plain)
        return by_budget(evaluation)[0].kind

    for seed in range(20):
        keys, values = 8192, torch.randn(8192, 64, generator=torch.Generator().manual_seed(seed)) + 0.2
        one_by_one = torch.zeros(64)
        for value in values / keys:
            one_by_one += value
        assert kind("another", keys, values, one_by_one) != ""
        assert kind("paged_prefill", keys, values, one_by_one) == ""
        assert kind("paged_prefill", keys, values, one_by_one - values[17] / keys) != ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_has_no_room_for_rounding(dtype):
    exact = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    actual = exact.clone()
    actual[1, 2] += 4 * ulp_of(exact.double(), dtype)[1, 2].to(dtype)
    assert verdict(exact, exact.double(), exact) == ""
    assert verdict(actual, exact.double(), exact) == "error_budget"


KINDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "finite": 1.0}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_non_finite_values_match_in_place_and_kind(value):
    exact = torch.ones(2, 3, dtype=torch.float64)
    exact[1, 1] = KINDS[value]
    assert verdict(exact.float(), exact, exact.float()) == ""
    for wrong in KINDS.keys() - {value}:
        actual = exact.float()
        actual[1, 1] = KINDS[wrong]
        finding = within_budget("output", actual, exact, exact.float())
        assert (finding.kind, finding.at) == ("non_finite", (1, 1))


def test_where_the_dtype_overflows_infinity_is_right_and_a_clamped_value_is_not():
    exact = torch.full((1, 4), 1e5, dtype=torch.float64)
    assert verdict(exact.half(), exact, exact.half()) == ""
    assert verdict(exact.half().clamp(max=65504), exact, exact.half()) == "non_finite"


def router(seed, dtype=torch.float32, **sizes):
    arguments = topk_softmax.example(torch.Generator().manual_seed(seed), "cpu", dtype, **sizes)
    return arguments, *topk_softmax.reference(**arguments)


def judged(arguments, weights, ids):
    findings = compare_topk(Evaluation("topk_softmax", arguments, {"output[0]": weights, "output[1]": ids}, {}, {}))
    return next((finding.kind for finding in findings if finding.kind), "")


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_of_experts_within_rounding_may_differ(dtype):
    for seed in SEEDS:
        arguments, *_ = router(seed, dtype, T=8, E=60, topk=6, bias=seed % 2 == 0)
        bias = arguments["correction_bias"]
        p = torch.softmax(arguments["gating_output"].double(), -1).float()  # rounded otherwise than in float32
        ids = (p if bias is None else p + bias).argsort(dim=-1, descending=True, stable=True)[:, :6]
        weights = p.gather(-1, ids)
        assert judged(arguments, weights / weights.sum(-1, keepdim=True), ids.int()) == ""


def test_topk_by_way_of_logarithms_is_right():
    """Logits next to 0 do not move by a share of themselves, and the plain weight, 1/67, is as good as can be."""
    logits = torch.full((3, 67), 6e-8, dtype=torch.float16)
    weights = (logits.float() - logits.float().logsumexp(-1, keepdim=True)).exp()[:, :1]
    arguments = {"gating_output": logits, "topk": 1, "renormalize": False}
    assert judged(arguments, weights, torch.zeros(3, 1)) == ""
    assert judged(arguments, weights * (1 + 1e-5), torch.zeros(3, 1)).endswith("error_budget")


def test_topk_of_experts_whose_probability_is_0_in_float32_may_have_nan_weights():
    arguments = {"gating_output": torch.tensor([[0.0, -200.0]]), "topk": 1, "correction_bias": torch.tensor([0.0, 9.0])}
    weights, ids = topk_softmax.reference(**arguments)
    assert weights.isnan().all() and judged(arguments, weights, ids) == ""
    assert judged(arguments, torch.ones(1, 1), ids) == ""
    arguments["gating_output"][0, 1] = -80
    assert judged(arguments, weights, ids) == "non_finite"


def test_topk_convicts_wrong_experts_weights_and_ties():
    arguments, weights, ids = router(0, T=4, E=60, topk=4)
    assert judged(arguments, weights, ids) == ""
    assert judged(arguments, weights.flip(1), ids.flip(1)) == "wrong_id"
    assert judged(arguments, weights * torch.tensor([[1.0], [1.01], [1.0], [1.0]]), ids).endswith("error_budget")
    assert judged(arguments, weights, torch.zeros_like(ids)) == "id_repeated"
    assert judged(arguments, weights, ids + 60) == "id_out_of_range"
    tied = {"gating_output": torch.zeros(1, 8), "topk": 3}
    third = torch.full((1, 3), 1 / 3)
    assert judged(tied, third, torch.tensor([[0, 1, 2]])) == ""
    assert judged(tied, third, torch.tensor([[0, 2, 1]])) == "tie"
    assert judged(tied, third, torch.tensor([[0, 1, 3]])) == "tie"


def test_topk_of_a_nan_row_may_be_any_distinct_experts_with_nan_weights():
    arguments = {"gating_output": torch.zeros(1, 8).index_fill(1, torch.tensor([3]), float("nan")), "topk": 2}
    nan = torch.full((1, 2), float("nan"))
    assert judged(arguments, nan, torch.tensor([[5, 1]])) == ""
    assert judged(arguments, nan, torch.tensor([[0, 0]])) == "id_repeated"
    assert judged(arguments, torch.ones(1, 2), torch.tensor([[5, 1]])) == "non_finite"
