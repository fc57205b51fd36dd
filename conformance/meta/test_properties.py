"""Each property convicts a fault planted for it, and acquits the reference."""

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import shim
from conformance.case import at_level
from conformance.cases import all_cases
from conformance.mutants.parts import packed
from conformance.properties import guards
from conformance.run import Target, run
from conformance.selection import Selection

ROOT = Path(__file__).resolve().parents[2]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
EVERY = {"canary", "unwritten", "inputs_unchanged", "strided", "misaligned", "determinism", "every_residue", "quiet"}
CUDA = {"graph_replay", "stream", "no_sync", "chain"}


def find(op, kind, name="", dtype=F32):
    """The first property case of that op, kind and dtype whose name has `name` in it."""
    return next(c for c in all_cases() if c.check and (c.op, c.kind, c.dtype) == (op, kind, dtype) and name in c.id)


def verdict(case, function, **more):
    return run(case, Target(shim.get(case.op), "mine", "cpu", function, **more))


def reference(op):
    return shim.get(op).reference


SPEAKER = """
import os, sys
import shim
import ops_reference

kept = sys.stderr

@shim.implementation("moe_sum", provider="mine")
def moe_sum(y, topk_ids=None):
    print("one")
    kept.write("two\\n")
    os.write(2, b"three\\n")
    return shim.get("moe_sum").reference(y, topk_ids)
"""


def writes_behind_its_output(y, topk_ids=None):
    out = torch.empty(len(y), y.shape[2], dtype=y.dtype)
    out.copy_(reference("moe_sum")(y, topk_ids))
    beyond = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset()
    if beyond > out.numel():  # as a kernel's last tile does it
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
    return out


def reads_before_its_input(y, topk_ids=None):
    out = reference("moe_sum")(y, topk_ids)
    return out + 0 * y.as_strided((1,), (1,), y.storage_offset() - 1) if y.storage_offset() else out


def leaves_the_last_column(y, topk_ids=None):
    out = torch.empty(len(y), y.shape[2], dtype=y.dtype)
    out[:, :-1] = reference("moe_sum")(y, topk_ids)[:, :-1]
    return out


def subtracts_in_place(gating_output, topk, renormalize=True, correction_bias=None):
    gating_output.sub_(gating_output.amax(-1, keepdim=True))
    return reference("topk_softmax")(gating_output, topk, renormalize, correction_bias)


def masks_by_a_product(y, topk_ids=None):
    return (y.float() * (topk_ids >= 0)[..., None]).sum(1).to(y.dtype)


def sanitises(a, b, A_log, dt_bias):
    return reference("gdn_gating")(a.nan_to_num(0), b, A_log, dt_bias)


def takes_it_for_contiguous(y, topk_ids=None):
    return reference("moe_sum")(packed(y), topk_ids)


def loads_sixteen_bytes(y, topk_ids=None):
    return reference("moe_sum")(y, topk_ids) * (1 if y.data_ptr() % 16 == 0 else 0.5)


def offsets_in_32_bits(a, b, A_log, dt_bias):
    g, beta = reference("gdn_gating")(a, b, A_log, dt_bias)
    wrapped = torch.arange(len(b)) * b.stride(0) >= 2**31
    return g, beta.masked_fill(wrapped[:, None], 0)


def sums_in_any_order(y, topk_ids=None):
    order = torch.randperm(y.shape[1])
    return reference("moe_sum")(y[:, order], topk_ids[:, order] if topk_ids is not None else None)


def splits_by_threads(y, topk_ids=None):
    parts = [one.float().sum(1) for one in y.split(torch.get_num_threads(), dim=1)]
    return torch.stack(parts).sum(0).to(y.dtype)


def forgets_the_last_thread(y, topk_ids=None):
    return splits_by_threads(y[:, : 1 - torch.get_num_threads() or None])


def first_row_is_special(y, topk_ids=None):
    out = reference("moe_sum")(y, topk_ids)
    out[0] *= 1.02
    return out


def forgets_in_the_second_call(q, k, v, g, beta, state, state_indices, has_initial_state, *more, **options):
    again = has_initial_state & (~has_initial_state.all())
    return reference("gdn_prefill")(q, k, v, g, beta, state, state_indices, again, *more, **options)


def one_row_takes_another_path(a, b, bias=None):
    return reference("matmul_fp16")(a, b, bias) * (1.02 if len(a) == 1 else 1)


def clamps_beta(a, b, A_log, dt_bias):
    g, beta = reference("gdn_gating")(a, b, A_log, dt_bias)
    return g, beta.clamp(min=0.2)


def rounds_the_state(**arguments):
    out = reference("gdn_decode")(**arguments)
    arguments["state"].copy_(arguments["state"].bfloat16())
    return out


def drops_a_tail_of_one(y, topk_ids=None):
    out = reference("moe_sum")(y, topk_ids)
    if out.shape[1] % 32 == 1:
        out[:, -1] = 0
    return out


FAULTS = [
    (find("moe_sum", "canary"), writes_behind_its_output, "wrote_outside"),
    (find("moe_sum", "canary"), reads_before_its_input, "read_outside"),
    (find("moe_sum", "unwritten"), leaves_the_last_column, "unwritten"),
    (find("topk_softmax", "inputs_unchanged"), subtracts_in_place, "wrote_inputs"),
    (find("moe_sum", "nan_irrelevant"), masks_by_a_product, "reached"),
    (find("gdn_gating", "nan_relevant"), sanitises, "non_finite"),
    (find("moe_sum", "strided", "byrows"), takes_it_for_contiguous, None),
    (find("moe_sum", "misaligned"), loads_sixteen_bytes, None),
    (find("gdn_gating", "large_offsets", dtype=F16), offsets_in_32_bits, None),
    (find("moe_sum", "determinism"), sums_in_any_order, "changes"),
    (find("moe_sum", "determinism"), forgets_the_last_thread, None),
    (find("moe_sum", "permutation", "waytokens"), first_row_is_special, None),
    (find("gdn_prefill", "composition", "two_calls"), forgets_in_the_second_call, None),
    (find("matmul_fp16", "batch_invariance", "wayrows", F16), one_row_takes_another_path, None),
    (find("gdn_gating", "identities"), clamps_beta, None),
    (find("gdn_decode", "long_horizon", "waysteps"), rounds_the_state, None),
    (find("moe_sum", "every_residue"), drops_a_tail_of_one, None),
]


@pytest.mark.parametrize(("case", "fault", "reason"), FAULTS, ids=[f"{c.kind}-{f.__name__}" for c, f, _ in FAULTS])
def test_convicts_the_fault_and_acquits_the_reference(case, fault, reason):
    right = verdict(case, reference(case.op))
    if right.reason == "no_memory":
        pytest.skip(right.message)
    assert (right.status, right.message) == ("pass", "")
    wrong = verdict(case, fault)
    assert wrong.status == "fail", f"{case.id} acquits {fault.__name__}"
    assert reason in (None, wrong.reason)


def test_another_order_of_sums_under_other_counts_of_threads_is_right():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        right = verdict(find("moe_sum", "determinism"), splits_by_threads)
    finally:
        torch.set_num_threads(before)
    assert (right.status, right.findings[0]["text"]) == ("pass", "bits depend on the count of threads")


@pytest.mark.parametrize("op", shim.names())
def test_every_rule_is_a_kind_of_every_op(op):
    mine = [case for case in all_cases() if case.op == op]
    assert EVERY <= {case.kind for case in mine if case.check and case.level == "quick"}
    assert {"large_offsets"} <= {case.kind for case in mine if case.check}
    assert "empty" in {case.kind for case in mine if case.level == "quick"}  # rule 7
    assert {case.kind for case in at_level(mine, "quick", "cuda")} >= CUDA
    assert not {case.kind for case in at_level(mine, "exhaustive", "cpu")} & CUDA


def test_a_run_lists_properties_as_it_lists_cases():
    listed = {case.kind for _, case in Selection.make(ops=["moe_sum"]).cases()}
    assert EVERY | {"nan_irrelevant", "nan_relevant", "permutation", "batch_invariance", "sizes", "negative_ids"} <= listed


@pytest.mark.parametrize("kind", sorted(EVERY))
def test_a_refusal_is_a_skip_and_an_error_a_failure(kind):
    def broken(y, topk_ids=None):
        raise RuntimeError("no kernel image")

    refused = verdict(find("moe_sum", kind), broken, supports=lambda **arguments: "not today")
    assert (refused.status, refused.reason) == ("skip", "refused")
    assert "not today" in refused.message
    failed = verdict(find("moe_sum", kind), broken)
    assert (failed.status, failed.reason) == ("fail", "raised")
    assert "no kernel image" in failed.message


def test_a_layout_that_is_refused_is_told_beside_those_that_are_right():
    result = verdict(
        find("moe_sum", "strided", "byrows"), reference("moe_sum"),
        supports=lambda y, topk_ids=None: topk_ids.is_contiguous() or "topk_ids has gaps",
    )  # fmt: skip
    assert result.status == "pass"
    assert ["topk_ids has gaps" in one["text"] for one in result.findings if one["output"] == "refused"] == [True, True]


KEPT: list = []
SAYS = {
    "print": lambda: print("a line"),
    "stderr": lambda: sys.stderr.write("a line\nand another"),
    "kept_stream": lambda: (KEPT.append(sys.stderr), KEPT[0].write("a line")),  # as a handler's of logging
    "descriptor_1": lambda: os.write(1, b"a line"),
    "descriptor_2": lambda: os.write(2, b"a line\n"),
    "printf": lambda: ctypes.CDLL(None).printf(b"a line"),
    "child": lambda: subprocess.run(["echo", "a line"], check=True),
}


@pytest.mark.parametrize("way", SAYS)
def test_what_a_call_prints_is_heard_and_printed_nowhere(way, capfd):
    def speaking(y, topk_ids=None):
        SAYS[way]()
        return reference("moe_sum")(y, topk_ids)

    calls = []

    def speaking_once(y, topk_ids=None):
        calls.append(y)
        return speaking(y, topk_ids) if len(calls) == 1 else reference("moe_sum")(y, topk_ids)

    result = verdict(find("moe_sum", "quiet"), speaking)
    assert (result.status, result.reason) == ("fail", "printed")
    assert "the first: 'a line'" in result.message
    assert verdict(find("moe_sum", "quiet"), speaking_once).status == "pass"
    os.write(2, b"heard")
    assert capfd.readouterr().err.endswith("heard")


@pytest.mark.parametrize("capture", ["fd", "sys", "no"])
def test_calls_are_heard_however_pytest_captures(capture, tmp_path):
    (tmp_path / "mine.py").write_text(SPEAKER)
    given = [f"--provider-file={tmp_path / 'mine.py'}", "--provider=mine", "--op=moe_sum", "-k", "quiet and f32"]
    command = [sys.executable, "-m", "pytest", "conformance/test_cases.py", "-q", f"--capture={capture}", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "printed: call: the second of two equal calls wrote 3 lines" in done.stdout, done.stdout + done.stderr


def test_a_warning_is_no_print():
    def warning(y, topk_ids=None):
        warnings.warn("a line", stacklevel=1)
        return reference("moe_sum")(y, topk_ids)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *words: print(*words)  # not pytest's, which keeps them
        assert verdict(find("moe_sum", "quiet"), warning).status == "pass"


def test_a_result_of_another_shape_or_type_is_a_failure():
    for wrong in (lambda y, topk_ids=None: y, lambda y, topk_ids=None: None, lambda y, topk_ids=None: [y.tolist()]):
        for kind in ("permutation", "strided", "every_residue"):
            assert verdict(find("moe_sum", kind), wrong).status == "fail"


def test_a_residue_that_is_wrong_is_named():
    assert "topk 2, N 1," in verdict(find("moe_sum", "every_residue"), drops_a_tail_of_one).message


@pytest.mark.parametrize(
    ("kind", "name", "fault", "told"),
    [
        ("every_residue", "", drops_a_tail_of_one, "float32 [3, 2, 1]"),
        ("misaligned", "by3", loads_sixteen_bytes, "strides [200, 40, 1] offset 3"),
        ("strided", "byrows", takes_it_for_contiguous, "strides [224, 40, 1] offset 8"),
    ],
)
def test_a_failure_shows_the_arguments_of_the_call_that_failed(kind, name, fault, told):
    result = verdict(find("moe_sum", kind, name), fault)
    assert result.status == "fail" and told in result.arguments["y"]


def test_where_several_calls_are_one_answer_a_failure_shows_the_whole():
    result = verdict(find("moe_sum", "batch_invariance"), lambda y, topk_ids: reference("moe_sum")(y, None))
    assert result.status == "fail" and "[9, 5, 40]" in result.arguments["y"]


def test_another_order_is_reported_as_bitwise_or_within_the_budget():
    def pairwise(y, topk_ids=None):
        y = y.float() if topk_ids is None else y.float().masked_fill(topk_ids[..., None] < 0, 0)
        return (y[:, ::2].sum(1) + y[:, 1::2].sum(1)).bfloat16()

    tokens = verdict(find("moe_sum", "permutation", "waytokens", BF16), pairwise)
    slots = verdict(find("moe_sum", "permutation", "wayslots", BF16), pairwise)
    assert [tokens.findings[0]["text"], slots.status] == ["bitwise equal to the whole call", "pass"]
    assert slots.findings[0]["text"] in ("bitwise equal to the whole call", "within the budget")


def test_memory_between_bands_keeps_values_strides_and_shared_buffers():
    packed_rows = torch.arange(12.0).view(3, 4)
    arguments = {"a": packed_rows[:, :2], "b": packed_rows[:, 2:], "n": 3}
    bands = guards.Bands(0xFF)
    moved = bands.arguments(arguments)
    assert all(torch.equal(moved[name], arguments[name]) for name in arguments if name != "n")
    assert moved["a"].stride() == arguments["a"].stride()
    assert moved["a"].untyped_storage().data_ptr() == moved["b"].untyped_storage().data_ptr()
    assert bands.touched() == []
    moved["b"].as_strided((1,), (1,), moved["b"].storage_offset() + 10).zero_()
    assert bands.touched() == ["a"]
