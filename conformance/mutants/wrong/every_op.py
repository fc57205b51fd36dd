"""The same fault in each op."""

from __future__ import annotations

from torch import Tensor

import shim
from conformance.mutants import Call, mutant
from conformance.mutants.parts import rows_within_31_bits


def offsets_in_32_bits(call: Call):
    """row * stride is kept in 32 bits: rows that begin beyond 2^31 elements are taken from elsewhere."""
    rows = {n: x for n, x in vars(call).items() if isinstance(x, Tensor) and x.dim() > 1 and len(x)}
    return call(**{name: rows_within_31_bits(x) for name, x in rows.items()})


def updates_a_copy(call: Call):
    """The pool is copied, the copy updated and put in its place: views of the pool that others hold see nothing of it."""
    pools = {name: pool for name, pool in vars(call).items() if name in ("state", "key_cache", "value_cache")}
    copies = {name: pool.clone() for name, pool in pools.items()}
    out = call(**copies)
    for name, pool in pools.items():
        pool.data = copies[name]
    return out


for op in shim.names():
    mutant(op, "large_offsets", level="exhaustive")(offsets_in_32_bits)
    if shim.get(op).mutates:
        mutant(op, "inputs_unchanged", "sizes")(updates_a_copy)
