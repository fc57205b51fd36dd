"""The gated delta rule of Qwen3-Next's linear attention layers: gates, prefill of ragged sequences, decode.

Each value head keeps a state S [V,K], a linear map from keys to values. A token decays it, corrects what it stores
under the token's key, and reads it with the query:

    S <- exp(min(g_t, 0)) * S
    S <- S + beta_t (v_t - S k_t) k_t^T
    o_t = scale * S q_t

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464); the
names are flash-linear-attention's. Several value heads may share one query/key head: hv uses head hv // (HV/H).
The recurrence is the definition; `gated_delta_net_chunked.py` has the form that kernels with large tiles use.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import shim
from ops_reference.common import INT32, NATIVE_ACT, names_of, need_act, need_tensor, refuse, wide

L2NORM_EPS = 1e-6
BOOL = frozenset({torch.bool})
_F32, _I32, _BOOL = torch.float32, torch.int32, torch.bool  # a look-up in torch each time would show


@shim.op()
def gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The log-decay g and the write strength beta of each token and value head.

    a, b [T,HV] act; A_log, dt_bias [HV] float32 -> g [T,HV] float32, at most 0; beta [T,HV] float32.

        g = -exp(A_log) * softplus(a + dt_bias)        beta = sigmoid(b)

    Raises OpArgumentError for wrong dtypes and shapes.
    """
    compute = wide(a.dtype)
    x = a.to(compute) + dt_bias
    softplus = torch.logaddexp(x, torch.zeros_like(x))  # log(1 + e^x), without overflow
    return -A_log.exp() * softplus, b.to(compute).sigmoid()


@shim.op(mutates=("state",))
def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    l2norm: bool = True,
) -> Tensor:
    """Runs the gated delta rule over N sequences laid end to end, and leaves their final states in the pool.

    q, k [T,H,K], v [T,HV,V] act; g, beta [T,HV] float32; state [S,HV,V,K] float32 or act, in place;
    state_indices [N] int32, has_initial_state [N] bool, cu_seqlens [N+1] int32 -> o [T,HV,V] act.

    Sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1]. Its state starts from state[state_indices[n]] where
    has_initial_state[n], else from zero, and is kept in float32 until it ends there, rounded once: so a sequence
    without tokens leaves its state as it was, or zero. A negative index names no slot: the sequence starts from zero
    and its state is dropped. Indices of one call are distinct. Tokens outside every sequence have output zero.
    scale defaults to K^-0.5. With l2norm, q and k are divided by sqrt(sum of squares over K + 1e-6) first.

    Raises OpArgumentError for wrong dtypes and shapes.
    """
    o = v.new_zeros(v.shape)
    q, k, v, scale = prepare(q, k, v, scale, l2norm)
    decay = g.clamp(max=0).exp()
    bounds = cu_seqlens.tolist()
    for n, (slot, continued) in enumerate(zip(state_indices.tolist(), has_initial_state.tolist(), strict=True)):
        s = initial_state(state, slot if continued else -1, v.dtype)
        for t in range(bounds[n], bounds[n + 1]):
            s, o[t] = step(s, q[t], k[t], v[t], decay[t], beta[t], scale)
        if slot >= 0:
            state[slot] = s
    return o


@shim.op(mutates=("state",))
def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    l2norm: bool = True,
    null_index: int = -1,
) -> Tensor:
    """One token per row: gdn_gating and one step of the gated delta rule, with each row's state updated in the pool.

    q, k [B,H,K], v [B,HV,V], a, b [B,HV] act; A_log, dt_bias [HV] float32; state [S,HV,V,K] float32 or act, in place;
    state_indices [B] int32 -> o [B,HV,V] act.

    A row whose index is negative or equals null_index is padding: its state is neither read nor written, whatever the
    row holds, and its output is zero. The other indices are distinct. scale and l2norm as in gdn_prefill.

    Raises OpArgumentError for wrong dtypes and shapes.
    """
    o = v.new_zeros(v.shape)
    rows = ((state_indices >= 0) & (state_indices != null_index)).nonzero().squeeze(1)
    slots = state_indices[rows].long()
    g, beta = gdn_gating.reference(a[rows], b[rows], A_log, dt_bias)
    q, k, v, scale = prepare(q[rows], k[rows], v[rows], scale, l2norm)
    s, out = step(state[slots].to(v.dtype), q, k, v, g.clamp(max=0).exp(), beta, scale)
    state[slots] = s.to(state.dtype)
    o[rows] = out.to(o.dtype)
    return o


def prepare(q: Tensor, k: Tensor, v: Tensor, scale: float | None, l2norm: bool) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k and v as the recurrence takes them, in float32 or wider: normalised, one q and k per value head; the scale.

    q, k [T,H,K], v [T,HV,V] -> q, k [T,HV,K], v [T,HV,V], scale.
    """
    compute, group = wide(v.dtype), v.shape[1] // q.shape[1]
    q, k = (x.to(compute) for x in (q, k))
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + L2NORM_EPS).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    return q, k, v.to(compute), q.shape[-1] ** -0.5 if scale is None else scale


def initial_state(state: Tensor, slot: int, compute: torch.dtype) -> Tensor:
    """The state [HV,V,K] that a sequence starts from, in the dtype `compute`: a slot's, or zero for a negative slot."""
    if slot < 0:
        return state.new_zeros(state.shape[1:], dtype=compute)
    return state[slot].to(compute)


def step(
    s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence; returns the new state and the output [...,V].

    s [...,V,K], q, k [...,K], v [...,V], decay, beta [...]: any leading dimensions.
    """
    s = decay[..., None, None] * s
    correction = beta[..., None] * (v - apply(s, k))
    s = s + correction[..., None] * k[..., None, :]
    return s, scale * apply(s, q)


def apply(s: Tensor, x: Tensor) -> Tensor:
    """s [...,V,K] times x [...,K] -> [...,V]."""
    return (s @ x[..., None]).squeeze(-1)


@gdn_gating.checks
def _check_gating(a, b, A_log, dt_bias):
    _, heads = need_act("gdn_gating", "a", a, 2)
    computed = (wide(a.dtype),)
    _need_all(
        "gdn_gating",
        a,
        ("b", b, a.shape, (a.dtype,)),
        ("A_log", A_log, (heads,), computed),
        ("dt_bias", dt_bias, (heads,), computed),
    )


# The checks of prefill and decode run before every kernel, so they accept the calls that are right in one expression;
# the functions `_explain_...`, which say the whole contract, look at the others.


@gdn_prefill.checks
def _check_prefill(q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True):
    try:
        act, device = q.dtype, q.get_device()
        T, H, K = qs = q.shape
        Tv, HV, V = v.shape
        _, HVs, Vs, Ks = state.shape
        (n,) = state_indices.shape
        if (
            (act in NATIVE_ACT and k.dtype is v.dtype is act and (state.dtype is _F32 or state.dtype is act))
            and (g.dtype is beta.dtype is _F32 and has_initial_state.dtype is _BOOL)
            and state_indices.dtype is cu_seqlens.dtype is _I32
            and k.get_device() == v.get_device() == g.get_device() == beta.get_device() == state.get_device() == device
            and state_indices.get_device() == has_initial_state.get_device() == cu_seqlens.get_device() == device
            and (k.shape == qs and g.shape == beta.shape == (T, HV) and Tv == T and HVs == HV and Vs == V and Ks == K)
            and (has_initial_state.shape == (n,) and cu_seqlens.shape == (n + 1,) and H > 0 and HV % H == 0)
            and (scale is None or isinstance(scale, float | int))
        ):
            return
    except (AttributeError, TypeError, ValueError):  # no tensor, or another count of dimensions
        pass
    _explain_prefill(q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale)


@gdn_decode.checks
def _check_decode(q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1):
    try:
        act, device = q.dtype, q.get_device()
        B, H, K = qs = q.shape
        Bv, HV, V = v.shape
        _, HVs, Vs, Ks = state.shape
        if (
            act in NATIVE_ACT
            and (k.dtype is v.dtype is a.dtype is b.dtype is act and (state.dtype is _F32 or state.dtype is act))
            and (A_log.dtype is dt_bias.dtype is _F32 and state_indices.dtype is _I32)
            and k.get_device() == v.get_device() == a.get_device() == b.get_device() == state.get_device() == device
            and A_log.get_device() == dt_bias.get_device() == state_indices.get_device() == device
            and (k.shape == qs and a.shape == b.shape == (B, HV) and Bv == B and HVs == HV and Vs == V and Ks == K)
            and (A_log.shape == dt_bias.shape == (HV,) and state_indices.shape == (B,) and H > 0 and HV % H == 0)
            and (scale is None or isinstance(scale, float | int))
        ):
            return
    except (AttributeError, TypeError, ValueError):
        pass
    _explain_decode(q, k, v, a, b, A_log, dt_bias, state, state_indices, scale)


def _explain_prefill(q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale):
    tokens, heads = _check_core("gdn_prefill", q, v, state, scale)
    (bounds,) = need_tensor("gdn_prefill", "cu_seqlens", cu_seqlens, 1, INT32, q.get_device())
    if bounds == 0:
        refuse("gdn_prefill", "cu_seqlens", "[N+1], at least one entry", cu_seqlens)
    computed = (wide(q.dtype),)
    _need_all(
        "gdn_prefill",
        q,
        ("k", k, q.shape, (q.dtype,)),
        ("g", g, (tokens, heads), computed),
        ("beta", beta, (tokens, heads), computed),
        ("state_indices", state_indices, (bounds - 1,), INT32),
        ("has_initial_state", has_initial_state, (bounds - 1,), BOOL),
    )


def _explain_decode(q, k, v, a, b, A_log, dt_bias, state, state_indices, scale):
    rows, heads = _check_core("gdn_decode", q, v, state, scale)
    act, computed = (q.dtype,), (wide(q.dtype),)
    _need_all(
        "gdn_decode",
        q,
        ("k", k, q.shape, act),
        ("a", a, (rows, heads), act),
        ("b", b, (rows, heads), act),
        ("A_log", A_log, (heads,), computed),
        ("dt_bias", dt_bias, (heads,), computed),
        ("state_indices", state_indices, (rows,), INT32),
    )


def _check_core(op, q, v, state, scale):
    """What prefill and decode share: v of the tokens of q, H dividing HV, a pool that fits. Returns tokens and HV."""
    tokens, heads, key_size = need_act(op, "q", q, 3)
    act, device = q.dtype, q.get_device()
    rows, value_heads, value_size = need_tensor(op, "v", v, 3, (act,), device)
    if rows != tokens or not heads or value_heads % heads:
        refuse(op, "v", f"[{tokens},HV,V] with HV a multiple of the {heads} heads of q", v)
    if need_tensor(op, "state", state, 4, (act, wide(act)), device)[1:] != (value_heads, value_size, key_size):
        refuse(op, "state", f"[S,{value_heads},{value_size},{key_size}]", state)
    if scale is not None and not isinstance(scale, float | int):
        refuse(op, "scale", "a number or None", scale)
    return tokens, value_heads


def _need_all(op, like, *wanted):
    """Refuses the first of (argument, value, shape, dtypes) that is no such tensor on the device of `like`.

    One loop for all, as a call per tensor would cost more than all else that happens before a kernel starts.
    """
    device = like.get_device()
    for argument, value, shape, dtypes in wanted:
        try:
            if value.shape == shape and value.dtype in dtypes and value.get_device() == device:
                continue
        except AttributeError:  # no tensor at all
            pass
        refuse(op, argument, f"{names_of(dtypes)} {list(shape)} on {like.device}", value)


@gdn_gating.domain
def _domain_gating(a, b, A_log, dt_bias):
    return a.dtype in NATIVE_ACT or f"a is {names_of([a.dtype])}"


@gdn_prefill.domain
def _domain_prefill(q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True):
    return q.dtype in NATIVE_ACT or f"q is {names_of([q.dtype])}"


@gdn_decode.domain
def _domain_decode(q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1):
    return q.dtype in NATIVE_ACT or f"q is {names_of([q.dtype])}"


@gdn_gating.fakes
def _fake_gating(a, b, A_log, dt_bias):
    return tuple(a.new_empty(a.shape, dtype=wide(a.dtype)) for _ in range(2))


@gdn_prefill.fakes
def _fake_prefill(q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True):
    return v.new_empty(v.shape)


@gdn_decode.fakes
def _fake_decode(q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1):
    return v.new_empty(v.shape)


@gdn_gating.inputs
def example_gating(generator, device, dtype, T=5, HV=4):
    """a and b are the two halves of one projection; A_log and dt_bias as a trained layer's are distributed."""
    ba = torch.randn(T, 2 * HV, generator=generator).to(device, dtype)
    return dict(a=ba[:, HV:], b=ba[:, :HV], **_decay_parameters(generator, device, dtype, HV))


@gdn_prefill.inputs
def example_prefill(generator, device, dtype, lengths=(5, 0, 12), H=2, HV=4, K=32, V=32, state_dtype=None):
    """Ragged sequences of those lengths; all but every third continue an earlier state.

    q, k and v are views into one projection, the pool has more slots than sequences, and pages padded.
    """
    N, T = len(lengths), sum(lengths)
    gating = example_gating(generator, device, dtype, T, HV)
    g, beta = gdn_gating.reference(**gating)
    return dict(
        **_projection(generator, device, dtype, T, H, HV, K, V),
        g=g,
        beta=beta,
        state=_pool(generator, device, state_dtype or wide(dtype), N + 2, HV, V, K),
        state_indices=_slots(generator, device, N),
        has_initial_state=torch.tensor([n % 3 != 2 for n in range(N)], dtype=torch.bool, device=device),
        cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32),
    )


@gdn_decode.inputs
def example_decode(generator, device, dtype, B=3, H=2, HV=4, K=32, V=32, state_dtype=None):
    """One token per row, in the layouts of `example_prefill`."""
    return dict(
        **_projection(generator, device, dtype, B, H, HV, K, V),
        **example_gating(generator, device, dtype, B, HV),
        state=_pool(generator, device, state_dtype or wide(dtype), B + 2, HV, V, K),
        state_indices=_slots(generator, device, B),
    )


def _decay_parameters(generator, device, dtype, HV):
    """A_log = log U(0,16) and dt_bias = softplus^-1 of a log-uniform time step in [0.001, 0.1], as Mamba2 does."""
    A = torch.rand(HV, generator=generator) * 16 + 1e-3
    dt = torch.exp(torch.rand(HV, generator=generator) * math.log(100) + math.log(1e-3))
    return {name: x.to(device, wide(dtype)) for name, x in (("A_log", A.log()), ("dt_bias", dt.expm1().log()))}


def _projection(generator, device, dtype, T, H, HV, K, V):
    packed = torch.randn(T, 2 * H * K + HV * V, generator=generator).to(device, dtype)
    q, k, v = packed.split([H * K, H * K, HV * V], dim=1)
    return {"q": q.view(T, H, K), "k": k.view(T, H, K), "v": v.view(T, HV, V)}


def _pool(generator, device, dtype, S, HV, V, K):
    """A state pool [S,HV,V,K] whose pages are 64 elements longer than a state."""
    pages = torch.randn(S, HV * V * K + 64, generator=generator).to(device, dtype)
    return pages[:, : HV * V * K].view(S, HV, V, K)


def _slots(generator, device, N):
    return (1 + torch.randperm(N, generator=generator)).to(device, torch.int32)
