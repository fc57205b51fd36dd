"""What the suite does about a GPU around a call; Triton is told by a stand-in."""

import sys
from types import ModuleType

import pytest
import torch

import shim
from conformance import accelerator
from conformance.case import Case
from conformance.cases import all_cases
from conformance.properties.cuda import telling
from conformance.run import Ended, Target, run


class OutOfResources(Exception):
    pass


class Autotuner:
    """configs: block sizes, of which none beyond the size is kept, and none above 512 fits the device."""

    arg_names = ("size",)

    def __init__(self, configs):
        self.configs = configs

    def prune_configs(self, kwargs):
        kept = [config for config in self.configs if config <= self.nargs["size"]]
        assert kept, "nothing is left"
        return kept

    def run(self, *args, **kwargs):
        if self.configs[0] > 512:
            raise OutOfResources
        return self.configs, args, kwargs


@pytest.fixture
def triton(monkeypatch):
    """A Triton whose autotuned kernels tell what they have to choose from; the wrapping ends with the test."""
    monkeypatch.setattr(Autotuner, "run", Autotuner.run)
    for name in ("triton", "triton.runtime", "triton.runtime.autotuner", "triton.runtime.errors"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["triton.runtime.autotuner"].Autotuner = Autotuner
    sys.modules["triton.runtime.errors"].OutOfResources = OutOfResources
    monkeypatch.setattr(accelerator, "version", lambda name: f"{name} 3")
    accelerator.first_configurations.cache_clear()
    yield
    accelerator.first_configurations.cache_clear()


def test_an_autotuned_kernel_takes_its_first_configuration(triton):
    before = Autotuner([64, 32, 16])
    assert accelerator.first_configurations() == "triton 3, the first configuration of each autotuned kernel"
    for kernel in (before, Autotuner([64, 32, 16])):
        assert kernel.run(100, grid=2) == ([64], (100,), {"grid": 2})
        assert kernel.run(50, grid=2) == ([32], (50,), {"grid": 2})
        assert kernel.configs == [64, 32, 16]


def test_a_configuration_that_does_not_fit_the_device_is_passed_over(triton):
    accelerator.first_configurations()
    kernel = Autotuner([2048, 1024, 256, 16])
    assert kernel.run(4096) == ([256], (4096,), {})
    assert kernel.configs == [2048, 1024, 256, 16]
    with pytest.raises(OutOfResources):
        Autotuner([2048, 1024]).run(4096)


def test_a_kernel_with_one_configuration_is_not_asked_which_it_keeps(triton):
    accelerator.first_configurations()
    assert Autotuner([64]).run(10) == ([64], (10,), {})


def test_a_machine_without_triton_has_nothing_to_tune(triton, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", None)
    assert accelerator.first_configurations() == ""


@pytest.fixture
def left(monkeypatch):
    """Errors that calls leave behind, on a device that tells the last one to whoever launches next."""
    errors = []

    def launch(*_):
        if errors:
            raise RuntimeError(errors.pop())

    example = Case.arguments
    monkeypatch.setattr(accelerator, "settle", launch)
    monkeypatch.setattr(Case, "arguments", lambda *given: launch() or example(*given))
    return errors


CASES = [case for case in all_cases() if case.op == "moe_sum"]
KINDS = ("empty", "canary", "search", "every_residue", "determinism")  # each way in which the suite calls


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("who", ["function", "supports"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_leaves_an_error_behind_has_raised_even_where_it_raises_itself(left, kind, who, raises):
    def leaves(**arguments):
        left.append("CUDA error: invalid argument")
        if raises:
            raise RuntimeError("CUDA error: invalid argument")

    functions = {"function": shim.get("moe_sum").reference, "supports": None, who: leaves}
    case = next(case for case in CASES if case.kind == kind)
    result = run(case, Target(shim.get("moe_sum"), "mine", "cpu", **functions))
    assert (result.status, result.reason) == ("fail", "raised") and "CUDA error: invalid argument" in result.message
    assert not left, "the next case would be told"


def test_calls_that_a_property_makes_by_itself_are_settled_too(left):
    with pytest.raises(Ended, match="in a graph: RuntimeError: CUDA error") as end, telling("in a graph"):
        left.append("CUDA error: invalid argument")
    assert (end.value.status, end.value.reason) == ("fail", "raised")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_error_that_a_call_left_behind_is_its_own():
    torch.cuda.cudart().cudaHostUnregister(4096)  # no such memory: CUDA keeps the error for whoever asks next
    with pytest.raises(RuntimeError, match="CUDA error"):
        accelerator.settle("cuda")
    accelerator.settle("cuda")
