"""A look at a model by the preflight of `serve`, without the import of its class; the bundled model, to be spoilt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from shim import dispatch
from shim.policy import Policy
from shim.vllm_plugin import checkpoint, preflight
from shim.vllm_plugin.dtype import served_dtype
from shim.vllm_plugin.findings import Plan
from shim.vllm_plugin.models import ops_for_model
from shim.vllm_plugin.serve import BUNDLED, USAGE, Options, find_model

ITEM = {"F16": 2, "BF16": 2, "F32": 4, "I64": 8}


def write(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file of zeros."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        first, end = end, end + ITEM[dtype] * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (one.dtype, one.shape) for name, one in checkpoint.read(folder).items()}


@pytest.fixture
def model(scratch):
    """A copy of the bundled model."""
    shutil.copytree(BUNDLED, scratch / "model")
    return scratch / "model"


@pytest.fixture
def edit(model):
    """edit(field=value, ...): changes the model's config.json; None takes a field out."""

    def edit(**fields):
        config = json.loads((model / "config.json").read_text()) | fields
        kept = {name: value for name, value in config.items() if value is not None}
        (model / "config.json").write_text(json.dumps(kept))

    return edit


class Imports:
    """Stands for the check of a model class's module."""

    def __init__(self, architecture, module, problem=None):
        self.module, self.problem = module, problem

    def result(self):
        return self.problem

    def close(self):
        pass


@pytest.fixture
def look(model, monkeypatch):
    """look(*vLLM options, policy=, environ=) -> the plan, and the findings by name."""
    monkeypatch.setattr(preflight, "ImportCheck", Imports)

    def look(*options, policy="strict", environ=()):
        given = Options(options)
        found = find_model(str(model), overrides=given.fields("--hf-overrides"))
        dtype = served_dtype(found, given)
        chains = dispatch.resolve(ops_for_model(found.config, dtype), "cpu", Policy.parse(policy))
        plan = Plan(found, given, dtype, "cpu", policy, chains, dict(environ))
        findings, told = preflight.preflight(plan, lambda one: None), {}
        for one in findings:
            told.setdefault(one.name, []).append(one)
        return plan, told

    return look


def stops(told, name, *words, code=USAGE):
    """The finding of that name which stands in the way, and it alone."""
    (one,) = [one for findings in told.values() for one in findings if one.code]
    assert (one.name, one.code) == (name, code), str(one)
    assert "\n" not in one.text
    for word in words:
        assert word in one.text, one.text


def free(told):
    assert not [str(one) for findings in told.values() for one in findings if one.code]
