"""Who wrote where: the bits of every argument's memory before and after a call, and that each is still that tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.compare import Finding

WRONG = float("inf")


def named_outputs(returned: Any) -> dict[str, Any]:
    """A call's outputs as findings name them: "output", or "output[0]", "output[1]", ... of a tuple."""
    if returned is None:
        return {}
    if isinstance(returned, tuple | list):
        return {f"output[{i}]": one for i, one in enumerate(returned)}
    return {"output": returned}


def unlike_memory(tensor: Tensor) -> str:
    """Why the tensor's memory does not hold its elements as they are, which whoever reads the memory takes them to be;
    empty where it does."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"layout {layout} instead of strided"
    return "its memory holds the negated elements (is_neg)" if tensor.is_neg() else ""


class Forms:
    """Remembers where each tensor among `arguments` lies and how: a call may write to it, but not make it another."""

    def __init__(self, arguments: dict[str, Any]):
        self.tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        self.before = {name: _form(tensor) for name, tensor in self.tensors.items()}

    def finding(self) -> Finding | None:
        """The first tensor that is another one now. Nobody else who holds the memory that it had, as other layers do of
        a pool, would see what was put into the new one."""
        for name, tensor in self.tensors.items():
            now = _form(tensor)
            changed = [what for what, was in self.before[name].items() if now[what] != was]
            if changed:
                text = f"the tensor itself was changed: other {' and '.join(changed)}"
                return Finding(name, "rebound", WRONG, text=text)
        return None


def _form(tensor: Tensor) -> dict[str, Any]:
    """Asks no device."""
    form = {"memory": tensor.data_ptr(), "shape": tensor.shape, "strides": tensor.stride(), "dtype": tensor.dtype}
    return form | {"offset": tensor.storage_offset(), "requires_grad": tensor.requires_grad}


class Watch:
    """Remembers the whole memory behind the tensors among `arguments` when made; `findings` says what changed since.

    The memory behind a view is its whole storage: the other views in it and the gaps between rows are watched too.
    """

    def __init__(self, arguments: dict[str, Any], mutates: tuple[str, ...]):
        self.forms, self.mutates = Forms(arguments), mutates
        self.tensors = self.forms.tensors
        self.before = {}
        for tensor in self.tensors.values():
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (_bytes(storage), _bytes(storage).clone()))

    def findings(self, returned: Any) -> list[Finding]:
        """One finding for the first tensor that is another one or was written to, where it should not be, or for an
        output that is not new memory."""
        rebound = self.forms.finding()
        if rebound:
            return [rebound]
        for name, output in named_outputs(returned).items():
            if not isinstance(output, Tensor) or unlike_memory(output):
                continue  # which is a finding of its own (run.py)
            if output.numel() and output.untyped_storage().data_ptr() in self.before:
                return [Finding(name, "aliases_input", WRONG, text="is a view of an argument, not new memory")]
        for pointer, (now, before) in self.before.items():
            changed = now != before
            if not changed.any():
                continue
            here = {n: t for n, t in self.tensors.items() if t.untyped_storage().data_ptr() == pointer}
            for name in here.keys() & set(self.mutates):
                _elements(changed, here[name]).fill_(False)
            if changed.any():
                return [_told(changed, here)]
        return []


def _told(changed: Tensor, here: dict[str, Tensor]) -> Finding:
    for name, tensor in here.items():
        wrong = _elements(changed, tensor).any(-1)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            return Finding(name, "wrote_inputs", WRONG, at=at, text=f"{int(wrong.sum())} elements were changed")
    text = f"{int(changed.sum())} bytes changed in its buffer, outside the tensor"
    return Finding(next(iter(here)), "wrote_outside", WRONG, text=text)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _elements(of_bytes: Tensor, tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, [*shape, itemsize], as a view of a tensor of its storage's bytes."""
    size = tensor.element_size()
    strides = [size * stride for stride in tensor.stride()]
    return of_bytes.as_strided((*tensor.shape, size), (*strides, 1), size * tensor.storage_offset())
