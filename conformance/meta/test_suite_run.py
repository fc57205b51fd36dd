"""Running a case: whatever a provider does wrong ends as a failure of that kind, never as a crash of the suite."""

import signal

import pytest
import torch

import shim
from conformance import selection
from conformance.case import Case, at_level, table
from conformance.cases import all_cases
from conformance.compare import compare_topk
from conformance.run import Target, run
from conformance.selection import Selection, SelectionError

F32 = torch.float32
ROUTER = Case("topk_softmax", "sizes", {"T": 4, "E": 16, "topk": 2}, F32, compare=compare_topk)
DECODE = Case("gdn_decode", "sizes", {"B": 2}, F32)
SUM = Case("moe_sum", "sizes", {"T": 4}, torch.bfloat16)


def ran(case, function, supports=None):
    return run(case, Target(shim.get(case.op), "mine", "cpu", function, supports))


def reference(case):
    return shim.get(case.op).reference


@pytest.mark.parametrize("case", [ROUTER, DECODE, SUM], ids=lambda case: case.op)
def test_the_reference_passes(case):
    result = ran(case, reference(case))
    assert (result.status, result.message) == ("pass", "")
    assert result.ratio < 1


@pytest.mark.parametrize("case", [ROUTER, DECODE, SUM], ids=lambda case: case.op)
def test_references_and_the_judge_may_be_on_another_device(case, monkeypatch):
    """Asked for by its index, it is another one to torch, on any machine."""
    monkeypatch.setattr("conformance.run.judge_device", "cpu:0")
    result = ran(case, reference(case))
    assert (result.status, result.message) == ("pass", "")
    assert 0 < result.ratio < 1

    def off(**arguments):
        returned = reference(case)(**arguments)
        (returned[0] if isinstance(returned, tuple) else returned).mul_(1.01)
        return returned

    assert ran(case, off).status == "fail"


def test_a_provider_that_raises():
    def broken(gating_output, topk, renormalize, correction_bias):
        raise RuntimeError("no kernel image")

    result = ran(ROUTER, broken)
    assert (result.status, result.reason) == ("fail", "raised")
    assert "RuntimeError: no kernel image" in result.message
    assert "gating_output" in result.arguments


def test_an_output_of_the_wrong_shape_dtype_type_or_count():
    for change, reason in [
        (lambda weights, ids: (weights[:-1], ids), "wrong_shape"),
        (lambda weights, ids: (weights, ids.long()), "wrong_dtype"),
        (lambda weights, ids: (weights, ids.to("meta")), "wrong_device"),
        (lambda weights, ids: (weights, ids.tolist()), "wrong_type"),
        (lambda weights, ids: weights, "wrong_count"),
        (lambda weights, ids: None, "wrong_count"),
    ]:
        result = ran(ROUTER, lambda change=change, **arguments: change(*reference(ROUTER)(**arguments)))
        assert (result.status, result.reason) == ("fail", reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda output: output[:, :-1], "wrong_shape"),
        (lambda output: output.to("meta"), "wrong_device"),
        (lambda output: output.to_sparse(), "wrong_layout"),
        (lambda output: output.float().to_mkldnn(), "wrong_layout"),
        (lambda output: torch.nested.as_nested_tensor(list(output), layout=torch.strided), "wrong_layout"),
        (lambda output: (output, output), "wrong_count"),
        (lambda output: None, "wrong_count"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_property_that_breaks_on_such_an_output_says_what_is_wrong_with_it(change, reason):
    kinds = ("batch_invariance", "permutation", "identities", "nan_relevant", "sizes")
    reasons = {
        ran(case, lambda **arguments: change(reference(SUM)(**arguments))).reason
        for case in at_level(all_cases(), "quick", "cpu")
        if case.op == "moe_sum" and case.kind in kinds
    }
    assert reason in reasons and "broken_case" not in reasons


def test_an_output_that_is_negated_when_it_is_read():
    """Right for torch, and not for a kernel that reads its memory."""
    result = ran(SUM, lambda **arguments: torch._neg_view(-reference(SUM)(**arguments)))
    assert (result.status, result.reason) == ("fail", "wrong_layout")


class Leaves(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, pytest.skip.Exception, Leaves])
@pytest.mark.parametrize("kind", ["sizes", "canary", "search"])
def test_a_provider_that_exits_has_raised(kind, error):
    def leaving(y, topk_ids=None):
        raise error("no licence")

    case = next(case for case in at_level(all_cases(), "quick", "cpu") if (case.op, case.kind) == ("moe_sum", kind))
    for result in (ran(case, leaving), ran(case, reference(SUM), leaving)):
        assert (result.status, result.reason) == ("fail", "raised")
        assert f"{error.__name__}: no licence ({__file__}:" in result.message


def test_the_users_interrupt_is_no_fault_of_the_provider():
    def interrupted(y, topk_ids=None):
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ran(SUM, interrupted)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", ["sizes", "canary", "search"])
def test_a_guard_that_raises_is_a_failure_of_the_provider(kind):
    def guard(y, topk_ids=None):
        raise KeyError("no table for this GPU")

    case = next(case for case in at_level(all_cases(), "quick", "cpu") if (case.op, case.kind) == ("moe_sum", kind))
    result = ran(case, reference(SUM), guard)
    assert (result.status, result.reason) == ("fail", "raised")
    assert result.message.startswith("supports: KeyError: 'no table for this GPU'")


@pytest.mark.parametrize("answer", [False, None, "", 1])
def test_a_guard_answers_true_or_in_words(answer):
    result = ran(SUM, reference(SUM), lambda y, topk_ids=None: answer)
    assert (result.status, result.reason) == ("fail", "raised")
    assert result.message.startswith(f"supports: TypeError: answered {answer!r}, where True or the reason in words is")


def test_an_element_that_nobody_wrote():
    def half_written(y, topk_ids=None):
        out = torch.empty(y.shape[0], y.shape[2], dtype=y.dtype)
        out[:-1] = reference(SUM)(y, topk_ids)[:-1]
        return out

    result = ran(SUM, half_written)
    assert (result.status, result.reason) == ("fail", "non_finite")
    assert result.findings[0]["at"] == (3, 0)


def test_writing_to_an_input():
    def scratching(y, topk_ids=None):
        out = reference(SUM)(y, topk_ids)
        y[2, 0, 1] = 7
        return out

    result = ran(SUM, scratching)
    assert (result.status, result.reason) == ("fail", "wrote_inputs")
    assert "y:" in result.message
    assert "[2, 0, 1]" in result.message


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda y: y.unsqueeze_(0), "shape and strides"),
        (lambda y: y.transpose_(1, 2), "shape and strides"),
        (lambda y: y.resize_(1), "shape and strides"),
        (lambda y: y.set_(), "memory and shape and strides"),
        (lambda y: y.requires_grad_(), "requires_grad"),
        (lambda y: setattr(y, "data", y.clone()), "memory"),
        (lambda y: y.untyped_storage().resize_(0), "memory"),
    ],
)
@pytest.mark.parametrize("kind", ["sizes", "inputs_unchanged", "permutation"])
def test_an_input_that_is_another_tensor_afterwards(kind, change, what):
    def changing(y, topk_ids=None):
        out = reference(SUM)(y, topk_ids)
        change(y)
        return out

    result = ran(next(case for case in all_cases() if (case.op, case.kind) == ("moe_sum", kind)), changing)
    assert (result.status, result.reason) == ("fail", "rebound")
    assert result.message == f"y: the tensor itself was changed: other {what}"


def test_an_in_place_argument_that_is_another_tensor_afterwards():
    def rebinding(**arguments):
        copy = arguments["state"].clone()
        out = reference(DECODE)(**{**arguments, "state": copy})
        arguments["state"].data = copy
        return out

    result = ran(DECODE, rebinding)
    assert (result.status, result.reason, result.findings[0]["output"]) == ("fail", "rebound", "state")


def test_an_output_that_is_a_view_of_an_input():
    assert ran(SUM, lambda y, topk_ids: y[:, 0]).reason == "aliases_input"


def pool_with_gaps(generator, device, dtype, **sizes):
    arguments = shim.get("gdn_decode").example(generator, device, dtype, **sizes)
    state = arguments["state"]
    buffer = torch.zeros(state.shape[0], state[0].numel() + 16, dtype=state.dtype)
    arguments["state"] = buffer[:, :-16].view(state.shape).copy_(state)
    return arguments


def test_writing_outside_an_in_place_argument_within_its_buffer():
    case = Case("gdn_decode", "padded_pool", {"B": 2}, F32, make=pool_with_gaps)

    def overrunning(**arguments):
        state = arguments["state"]
        out = reference(case)(**arguments)
        end = state.storage_offset() + state[0].numel()
        state.as_strided((1,), (1,), end).fill_(1)
        return out

    assert ran(case, reference(case)).status == "pass"
    assert ran(case, overrunning).reason == "wrote_outside"


def test_an_in_place_argument_left_as_it_was():
    def forgetful(**arguments):
        return reference(DECODE)(**{**arguments, "state": arguments["state"].clone()})

    result = ran(DECODE, forgetful)
    assert (result.status, result.findings[-1]["output"]) == ("fail", "state")


def test_a_refusal_is_a_skip_in_the_providers_words():
    result = ran(SUM, reference(SUM), lambda y, topk_ids=None: "needs float16")
    assert (result.status, result.reason, result.message) == ("skip", "refused", "needs float16")


def test_a_wrong_call_must_be_refused_by_the_argument_named():
    def three_experts_of_two(generator, device, dtype, **sizes):
        return {"gating_output": torch.zeros(2, 2), "topk": 3}

    def accepted(generator, device, dtype, **sizes):
        return {"gating_output": torch.zeros(2, 2), "topk": 1}

    def of(make, raises):
        return ran(Case("topk_softmax", "bad", {}, F32, make=make, raises=raises), None)

    assert of(three_experts_of_two, "topk").status == "pass"
    assert of(three_experts_of_two, "gating_output").reason == "not_refused"
    assert of(accepted, "topk").reason == "not_refused"


def test_what_a_provider_does_not_offer_is_a_skip_and_what_does_not_load_a_failure():
    op = shim.get("moe_sum")
    assert run(SUM, Target.find("moe_sum", "elsewhere", "cpu")).reason == "not_offered"
    result = run(SUM, Target(op, "native", "cpu", unavailable="no compiler"))
    assert (result.status, result.reason, result.message) == ("fail", "unavailable", "no compiler")


def test_arguments_depend_on_the_case_and_the_seed_alone():
    first, again = (ROUTER.arguments("cpu", ROUTER.seed()) for _ in range(2))
    assert torch.equal(first["gating_output"], again["gating_output"])
    assert not torch.equal(first["gating_output"], ROUTER.arguments("cpu", ROUTER.seed(1))["gating_output"])


def test_a_case_is_named_by_what_it_is():
    (case,) = table("gdn_prefill", "residues", [{"lengths": (1, 31), "scale": None}], (torch.bfloat16,))
    assert case.id == "gdn_prefill-residues-lengths1+31_scaleNone-bf16"


def test_a_level_includes_the_lower_ones():
    cases = [Case("moe_sum", "sizes", {}, F32, level) for level in ("quick", "standard", "exhaustive")]
    assert [len(at_level(cases, level)) for level in ("quick", "standard", "exhaustive")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "known"),
    [({"ops": ["moesum"]}, "moe_sum"), ({"provider": "nobody"}, "native"), ({"level": "slow"}, "quick")],
)
def test_unknown_names_are_answered_with_the_known_ones(wrong, known):
    with pytest.raises(shim.UnknownNameError, match=known):
        Selection.make(**wrong)


def test_selecting_no_case_is_an_error():
    with pytest.raises(SelectionError, match="no case"):
        Selection((), "native", ("cpu",), "quick").cases()


@pytest.mark.parametrize(
    ("without", "told"),
    [
        (lambda case: case.check and case.kind != "search", "op moe_sum has no roles: CONTRIBUTING.md"),
        (lambda case: case.kind == "search", "op moe_sum has no search plan: CONTRIBUTING.md"),
        (lambda case: case.op == "moe_sum", "op moe_sum has no case 'empty', no roles, no search plan: CONTRIBUTING.md"),
    ],
)
def test_an_op_on_which_no_rule_would_be_tried_is_not_run(without, told, monkeypatch):
    kept = [case for case in all_cases() if not without(case)]
    monkeypatch.setattr(selection, "all_cases", lambda: kept)
    with pytest.raises(SelectionError, match=told):
        Selection.make(["moe_sum"]).cases()
