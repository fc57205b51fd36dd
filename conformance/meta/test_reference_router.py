"""topk_softmax's reference: examples worked out by hand, and what its docstring promises."""

import pytest
import torch

from ops_reference.router import topk_softmax

NAN, INF = float("nan"), float("inf")
LOG = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64).log()


def test_picks_the_largest_first_and_renormalizes():
    weights, ids = topk_softmax.reference(LOG, 2)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[4 / 7, 3 / 7]], dtype=torch.float64))


def test_without_renormalize_weights_are_probabilities():
    weights, _ = topk_softmax.reference(LOG, 3, renormalize=False)
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.3, 0.2]], dtype=torch.float64))


def test_bias_chooses_but_does_not_weigh():
    bias = torch.tensor([0.25, 0.0, 0.0, 0.0], dtype=torch.float64)  # 0.35, 0.4, 0.2, 0.3
    weights, ids = topk_softmax.reference(LOG, 2, True, bias)
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.8, 0.2]], dtype=torch.float64))


def test_ties_go_to_the_lower_index():
    _, ids = topk_softmax.reference(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]]), 4)
    assert ids.tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize("row", [[NAN] * 4, [0, NAN, 2, 1], [0, 1, INF, 2], [INF, INF, 0, -INF], [-INF] * 4])
def test_a_row_without_probabilities_has_nan_weights_and_distinct_ids(row):
    weights, ids = topk_softmax.reference(torch.tensor([[0.0, 1.0, 2.0, 3.0], row]), 3)
    assert weights[1].isnan().all()
    assert ids[1].tolist() == [0, 1, 2]
    assert weights[0].isfinite().all()
    assert ids[0].tolist() == [3, 2, 1]


def test_minus_inf_has_no_probability():
    weights, ids = topk_softmax.reference(torch.tensor([[-INF, 0.0, -INF, -INF]]), 3)
    assert ids.tolist() == [[1, 0, 2]]
    assert weights.tolist() == [[1, 0, 0]]


def test_a_nan_bias_ranks_lowest():
    _, ids = topk_softmax.reference(torch.zeros(1, 4), 4, True, torch.tensor([NAN, -1.0, -INF, 0.0]))
    assert ids.tolist() == [[3, 1, 0, 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_types_are_computed_in_float32(dtype):
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights, ids = topk_softmax.reference(logits, 6)
    exact, same = topk_softmax.reference(logits.double(), 6)
    assert weights.dtype == torch.float32
    assert torch.equal(ids, same)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=0)
