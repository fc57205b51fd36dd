"""Is a result right? Judged against float64, with a budget that the plain PyTorch reference sets (design.md).

    exact    the reference on the arguments raised to float64: the right answer
    plain    the reference on the arguments as they are: what careful PyTorch reaches
    actual   what the provider returned

An error has two parts, and so has its budget. *Rounding*: storing a right answer in the output's dtype costs up to half
an ulp per element, u = rms(ulp) / sqrt(12) over a row (the last dimension); this is known without measuring. A kernel
may round intermediates to the activation dtype too, r of them (`ROUNDED`): U = u sqrt(1 + r). *Noise*: what float32
arithmetic adds, which depends on the inputs (cancellation, long sums); plain shows how much, as its error beyond half
an ulp. Per row of n elements, with noise as seen in plain:

    worst element   |error_i|  <=  3 ulp_i + 6 U + 12 max(noise)
    whole row       rms(error)  <=  3 (1 + 1/sqrt(n)) U + 12 rms(noise)
    its scale       |error . exact| / |exact|  <=  eps/2 |exact| + 7 U + 12 |noise|
    a value lost    0 stands only for what is below 12 (max(noise) + float32 eps max|exact| + excess), where excess is
                    how far the rms error of the row's other elements goes beyond 1.2 u

Why these constants. Independent roundings come to U in rms, a few times that on short rows, and 6 U + 3 ulp is over six
sigma of one element. Such errors have no direction, so a row that is wrong by a factor shows in its scale: 1% is about
6 sqrt(n) u in bfloat16 (8 times that in float16) where 7 U + 2.5 sqrt(n) u are granted, the second for one scalar of
the row (a router weight) rounded: convicted from 16 elements on. Subnormals add half an ulp each: a row of them may all
be rounded to 0. A lost element differs by 100% of itself, yet may be small: hence the last line. Where the exact row is
representable (a copy, a cleared row), U is 0 in the first line. The factor 12 on noise
is for another order of summation (the delta rule in chunks has 4 times the noise of the recurrence), and for exponentials
of fewer digits than the plain ones. Plain adds in blocks, so it does not show what adding n terms one by one costs:
some sqrt(n)/4 float32 eps of the sum, which torch's attention on some CPUs comes to on 4,000 keys (15 times the noise of
plain). Noise of an op that sums over a sequence (`SUMMED`), or over experts, is hence at least
sqrt(n) eps max|exact| / 12.

A short row may show no noise by luck. Before it convicts, the judge hears more witnesses: the float64 reference with
every input moved by about one float32 eps at random, eight times over, as one alone may be as lucky: what that moves the
answer by (rms) is no fault of the kernel's.

NaN and infinities match in place and kind (where plain overflows, either answer counts). Other dtypes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

ELEMENT_ULPS = 3.0
ELEMENT_ROUNDINGS = 6.0
ROW_ROUNDINGS = 3.0
SCALE_ROUNDINGS = 7.0
OWN_ROUNDING = 1.2
NOISE_FACTOR = 12.0
WITNESSES = 8
BEYOND_LUCK = 1e4  # times the budget
BEYOND_WORDS = 1e6  # times the budget, which may be next to nothing where exact is 0: more digits say no more
ROUNDED = {  # intermediates that kernels round to the activation dtype, as the common ones do; of other ops none
    "fused_moe": 4,  # gate, up, their product, the slot before the sum
    "grouped_gemm": 1,  # the row before its slot's weight
    "paged_attention_v2": 1,  # the weights before they meet the values
    "paged_prefill": 1,
}
SUMMED = {"paged_attention_v2": "seq_lens", "paged_prefill": "seq_lens"}  # argument: how many terms, for each sequence
EPS32 = torch.finfo(torch.float32).eps


@dataclass
class Evaluation:
    """One call of one op, evaluated three ways; results by name: "output" ("output[0]", ...) and in-place arguments."""

    op: str
    arguments: dict[str, Any]
    actual: dict[str, Tensor]
    exact: dict[str, Tensor]
    plain: dict[str, Tensor]
    move: Callable[[int], dict[str, Tensor]] | None = None  # (draw) -> exact, of inputs moved by a float32 eps

    @cached_property
    def moved_answers(self) -> list[dict[str, Tensor]]:
        return [self.move(draw) for draw in range(WITNESSES)] if self.move else []

    def on(self, device: str | None) -> Evaluation:
        """The same on another device, None: here."""
        if device is None:
            return self
        move = self.move and (lambda draw: placed(self.move(draw), device))
        arguments, actual, exact, plain = (placed(x, device) for x in (self.arguments, self.actual, self.exact, self.plain))
        return Evaluation(self.op, arguments, actual, exact, plain, move)


def placed(value: Any, device: str | torch.device) -> Any:
    """The value with its tensors on that device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: placed(one, device) for name, one in value.items()}
    return tuple(placed(one, device) for one in value) if isinstance(value, tuple) else value


@dataclass
class Finding:
    """The verdict on one output. `kind` is empty when it is right; `ratio` is error over budget, at the worst place.

    at         that place, of which error, budget, ulp (the element's error), actual and exact are told
    row_error  rms(error) / rms(exact) of its row
    worst_ulp  the largest error of an element in ulp, be its row's budget as wide as it may; worst_at: where
    """

    output: str
    kind: str = ""
    ratio: float = 0.0
    error: float = 0.0
    budget: float = 0.0
    ulp: float = 0.0
    at: tuple[int, ...] = field(default_factory=tuple)
    actual: float | None = None
    exact: float | None = None
    text: str = ""
    row_error: float = 0.0
    worst_ulp: float = 0.0
    worst_at: tuple[int, ...] = field(default_factory=tuple)


def short(ratio: float) -> str:
    """Error over budget as a number for people."""
    return "over 1e6" if BEYOND_WORDS < ratio < float("inf") else f"{ratio:.3g}"


def of_budget(ratio: float) -> str:
    return f"{short(ratio)} x its budget" if ratio > 1 else f"{ratio:.2f} of its budget"


def by_budget(evaluation: Evaluation) -> list[Finding]:
    """The default comparison: one finding per output and per in-place argument."""
    return [judge(evaluation, name) for name in evaluation.exact]


def judge(evaluation: Evaluation, name: str) -> Finding:
    """The verdict on one output; the other witnesses are only heard when plain would convict, not beyond all luck."""
    actual, exact, plain = (results[name] for results in (evaluation.actual, evaluation.exact, evaluation.plain))
    if not plain.dtype.is_floating_point:
        return equal(name, actual, exact)
    rounded, terms = ROUNDED.get(evaluation.op, 0), _terms(evaluation)
    finding = within_budget(name, actual, exact, plain, None, rounded, terms)
    if finding.kind in ("", "non_finite") or finding.ratio > BEYOND_LUCK:
        return finding
    witnesses = [answer[name] for answer in evaluation.moved_answers]
    return within_budget(name, actual, exact, plain, witnesses, rounded, terms)


def _terms(evaluation: Evaluation) -> int:
    """Of the longest sum that plain does not take one by one; 0 where there is none."""
    counts = evaluation.arguments.get(SUMMED.get(evaluation.op))
    return int(counts.max()) if counts is not None and counts.numel() else 0


def equal(name: str, actual: Tensor, expected: Tensor) -> Finding:
    """Integers and booleans: every element equal."""
    wrong = (actual != expected).nonzero()
    if not len(wrong):
        return Finding(name)
    at = tuple(wrong[0].tolist())
    return Finding(
        name, "unequal", float("inf"), at=at, actual=float(actual[at]), exact=float(expected[at]),
        text=f"{len(wrong)} of {actual.numel()} elements differ",
    )  # fmt: skip


def within_budget(
    name: str,
    actual: Tensor,
    exact: Tensor,
    plain: Tensor,
    moved: Sequence[Tensor] | None = None,
    rounded: int = 0,
    terms: int = 0,
) -> Finding:
    """The criteria of this module's docstring, on one floating-point output. rounded: how many intermediates may be;
    terms: that are summed."""
    shape, dtype = exact.shape, actual.dtype
    a, p, e = (_rows(t) for t in (actual, plain, exact))
    rows = (a != e).any(-1).nonzero()[:, 0]  # all others are exactly right
    if not len(rows):
        return Finding(name)
    a, p, e = a[rows], p[rows], e[rows]
    bad = _wrong_kind(a, p, e.to(dtype).double())
    if bad is not None:
        finding = _at(name, "non_finite", bad, rows, shape, a, e, float("inf"))
        finding.text = "NaN or infinity in the wrong place"
        return finding

    finite = a.isfinite() & p.isfinite() & e.isfinite()
    a, p, e = (torch.where(finite, t, 0.0) for t in (a, p, e))
    ulp = torch.where(finite, ulp_of(e, dtype), 0.0)
    error = (a - e).abs()
    noise = ((p - e).abs() - ulp / 2).clamp(min=0)
    noise = noise.maximum(terms**0.5 * EPS32 * e.abs().amax(-1, keepdim=True) / NOISE_FACTOR)
    if moved:
        by = torch.stack([torch.where(finite, _rows(answer)[rows] - e, 0.0) for answer in moved])
        noise = noise.maximum(by.square().mean(0).sqrt())
    criteria = _criteria(a, e, error, noise, ulp, finite, dtype, rounded)
    ratios = {kind: torch.where(finite, value / limit, 0.0) for kind, (value, limit) in criteria.items()}
    worst = max(ratios, key=lambda kind: float(ratios[kind].max()))
    ratio = ratios[worst]
    place = torch.where(ratio == ratio.max(), error, -1.0).argmax()  # of a row, its worst element
    value, limit = (t.flatten()[place].item() for t in criteria[worst])
    share = ratio.flatten()[place].item()
    finding = _at(name, worst if share > 1 else "", place, rows, shape, a, e, share)
    finding.error, finding.budget = value, limit
    in_ulp = error / ulp_of(e, dtype)
    finding.ulp, finding.worst_ulp = in_ulp.flatten()[place].item(), in_ulp.max().item()
    finding.worst_at = _index(int(in_ulp.argmax()), rows, shape)
    row, n = int(place) // e.shape[-1], finite.sum(-1, keepdim=True).clamp(min=1)
    off, size = (_rms(t, n)[row].item() for t in (error, e.abs()))
    finding.row_error = off / size if size else float("inf") if off else 0.0
    finding.text = SAID[worst]
    return finding


SAID = {
    "error_budget": "element",
    "row_error_budget": "rms of the row",
    "row_scale": "scale of the row",
    "missing": "0 in place of a value",
}


def _criteria(a, e, error, noise, ulp, finite, dtype, rounded) -> dict[str, tuple[Tensor, Tensor]]:
    """The four lines of the module's docstring, each as (what is measured, its limit), one number per element."""
    n = finite.sum(-1, keepdim=True).clamp(min=1)
    own = _rms(ulp, n) / 12**0.5
    unit = own * (1 + rounded) ** 0.5
    representable = (e.to(dtype).double() == e).all(-1, keepdim=True)
    most_noise, length = noise.amax(-1, keepdim=True), _rms(e.abs(), n) * n.sqrt()

    element = ELEMENT_ULPS * ulp + ELEMENT_ROUNDINGS * unit * ~representable + NOISE_FACTOR * most_noise
    row = ROW_ROUNDINGS * (1 + n.rsqrt()) * unit + NOISE_FACTOR * _rms(noise, n)
    along = ((a - e) * (e / length.clamp(min=torch.finfo(torch.float64).tiny))).sum(-1, keepdim=True).abs()
    scale = torch.finfo(dtype).eps / 2 * length + SCALE_ROUNDINGS * unit + NOISE_FACTOR * _rms(noise, n) * n.sqrt()
    scale += torch.where(e.abs() < torch.finfo(dtype).tiny, ulp / 2, 0.0).square().sum(-1, keepdim=True).sqrt()

    lost = (a == 0) & (e.abs() > torch.finfo(dtype).tiny)
    others = _rms(torch.where(lost, 0.0, error), n)
    excess = (others.square() - (OWN_ROUNDING * own).square()).clamp(min=0).sqrt()
    nothing = NOISE_FACTOR * (most_noise + EPS32 * e.abs().amax(-1, keepdim=True) + excess)
    return {
        "error_budget": (error, element),
        "row_error_budget": (_rms(error, n).expand_as(e), row.expand_as(e)),
        "row_scale": (along.expand_as(e), scale.expand_as(e)),
        "missing": (torch.where(lost & (e.abs() > nothing), e.abs(), 0.0), nothing.expand_as(e)),
    }


def ulp_of(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` at each value, subnormals included."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.abs().clamp(info.tiny, info.max)).exponent - 1
    return torch.ldexp(torch.full_like(value, info.eps), exponent)


def moved(draw: int) -> Callable[[Any], Any]:
    """What raises arguments to float64 and moves each element by about one float32 eps; others stay as they are."""
    generator = torch.Generator().manual_seed(draw)

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
            return value
        way = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        return value.double() * (1 + EPS32 * way)

    return move


def _rows(t: Tensor) -> Tensor:
    """As float64 rows of the last dimension; a scalar is a row of one."""
    return t.double().reshape(-1, t.shape[-1] if t.dim() else 1)


def _rms(t: Tensor, n: Tensor) -> Tensor:
    """Root mean square of each row's n elements that count; scaled, so that it does not overflow."""
    top = t.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return top * ((t / top).square().sum(-1, keepdim=True) / n).sqrt()


def _wrong_kind(actual: Tensor, plain: Tensor, exact: Tensor) -> int | None:
    """Flat index of the first element whose kind (finite, NaN, +inf, -inf) neither exact nor plain has."""
    def kind(t: Tensor) -> Tensor:
        return torch.where(t.isfinite(), 0.0, t).nan_to_num(nan=2.0, posinf=1.0, neginf=-1.0)

    overflown = exact.isfinite() & ~plain.isnan()
    wrong = (kind(actual) != kind(exact)) & ~(overflown & (kind(actual) == kind(plain)))
    return int(wrong.flatten().to(torch.uint8).argmax()) if wrong.any() else None


def _at(name: str, kind: str, place: int, rows: Tensor, shape, actual: Tensor, exact: Tensor, ratio: float) -> Finding:
    """A finding about the element at flat index `place` of the given rows of an output of that shape."""
    got, right = (t.flatten()[int(place)].item() for t in (actual, exact))
    return Finding(name, kind, ratio, at=_index(int(place), rows, shape), actual=got, exact=right)


def _index(place: int, rows: Tensor, shape) -> tuple[int, ...]:
    """Of the element at flat index `place` of the given rows, its index in an output of that shape."""
    if not shape:
        return ()
    row, column = divmod(place, shape[-1])
    return tuple(int(i) for i in torch.unravel_index(rows[row].cpu() * shape[-1] + column, shape))


def compare_topk(evaluation: Evaluation) -> list[Finding]:
    """topk_softmax: weights are judged at the provider's own ids; ids may differ from the reference's only where the
    float64 keys (probability + bias) are within float32 rounding of each other. Exactly equal logits and biases are a
    tie, which goes to the lower index. A row with NaN weights may hold any ids that are distinct and in range.
    """
    logits, topk, renormalize, bias = (
        evaluation.arguments.get(name, default)
        for name, default in (("gating_output", None), ("topk", None), ("renormalize", True), ("correction_bias", None))
    )
    weights, ids = evaluation.actual["output[0]"], evaluation.actual["output[1]"].long()
    experts = logits.shape[-1]
    outside = (ids < 0) | (ids >= experts)
    if outside.any():
        return [_ids("id_out_of_range", outside, ids, f"not in [0, {experts})")]
    again = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)
    if again.any():
        return [_ids("id_repeated", again, ids, "an expert twice in a row")]

    def chosen_weights(scores: Tensor) -> Tensor:
        chosen = scores.softmax(-1).gather(-1, ids)
        return chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen

    exact, plain = (chosen_weights(scores) for scores in (logits.double(), logits.float()))
    exact = torch.where(weights.isnan() & plain.isnan(), plain, exact)  # the bias chose experts of p = 0: 0 / 0
    witnesses = [chosen_weights(moved(draw)(logits)) for draw in range(WITNESSES)]
    findings = [within_budget("output[0]", weights, exact, plain, witnesses, terms=experts)]
    probability = logits.double().softmax(-1)
    shift = torch.zeros_like(probability[:1]) if bias is None else bias.double()
    key = probability + shift
    key = torch.where(key.isnan(), -torch.inf, key)
    settled = ~probability.isnan().any(-1, keepdim=True)
    best = key.argsort(dim=-1, descending=True, stable=True)[:, :topk]
    short = key.gather(-1, best) - key.gather(-1, ids)
    depth = (logits.amax(-1, keepdim=True).double() - logits).nan_to_num(posinf=0.0)  # exp(-x) errs by x eps
    rounding = EPS32 * ((4 + depth) * probability + 4 * shift.abs())
    wrong = settled & (short.abs() > 2 * rounding.gather(-1, best) + torch.finfo(torch.float32).tiny)
    if wrong.any():
        return [*findings, _ids("wrong_id", wrong, ids, "not the expert of that rank", best)]
    wrong = settled & _loses_tie(logits, bias, ids)
    if wrong.any():
        return [*findings, _ids("tie", wrong, ids, "of equal experts the lower index comes first", best)]
    return [*findings, Finding("output[1]")]


def _loses_tie(logits: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """[T,k]: slots before which, or instead of which, an exactly equal expert of lower index should stand."""
    experts = torch.arange(logits.shape[-1], device=ids.device)
    rank = torch.full(logits.shape, ids.shape[-1], device=ids.device)
    rank.scatter_(-1, ids, torch.arange(ids.shape[-1], device=ids.device).expand_as(ids).contiguous())
    same = logits[:, None, :] == logits.gather(-1, ids)[:, :, None]  # [T,k,E]
    if bias is not None:
        same &= bias == bias[ids][:, :, None]
    lower = experts < ids[:, :, None]
    later = rank[:, None, :] > torch.arange(ids.shape[-1], device=ids.device)[:, None]
    return (same & lower & later).any(-1)


def _ids(kind: str, wrong: Tensor, ids: Tensor, text: str, expected: Tensor | None = None) -> Finding:
    row, slot = wrong.nonzero()[0].tolist()
    exact = None if expected is None else float(expected[row, slot])
    actual = float(ids[row, slot])
    return Finding("output[1]", kind, float("inf"), at=(row, slot), actual=actual, exact=exact, text=text)
