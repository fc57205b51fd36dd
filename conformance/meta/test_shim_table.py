"""`bind`, and the table of who serves."""

import pytest
import torch

import shim
from conformance.meta.scratch import double_native, double_op, provider, tiny_library
from conformance.meta.test_shim_dispatch import X, op  # noqa: F401 - a fixture
from shim import dispatch
from shim.candidates import bind
from shim.policy import Policy, using


def test_bind_gives_one_provider_without_policy(op, scratch):  # noqa: F811
    provider(op, "p")
    double_native(op, tiny_library(scratch))
    with using(Policy("reference")):
        assert bind(op, "cpu", "p")(X)[0].item() == 7.0
        assert bind(op.name, "cpu", "native").label == "native:jit"
        assert bind(op, "cpu", "native:jit")(X)[0].item() == 2.0
        assert bind(op, "cpu", "reference")(X)[0].item() == 2.0


def test_bind_says_why_a_provider_is_unavailable_or_unknown(op, scratch):  # noqa: F811
    provider(op, "p", available=lambda: "libp.so is missing")
    double_native(op, tiny_library(scratch), "double_it")
    with pytest.raises(shim.OpUnavailableError, match="p: libp.so is missing"):
        bind(op, "cpu", "p")
    with pytest.raises(shim.OpUnavailableError, match="native:precompiled: no libtiny.so on the search path"):
        bind(op, "cpu", "native:precompiled")
    with pytest.raises(shim.OpUnavailableError, match="none for device cuda"):
        bind(op, "cuda", "native")
    with pytest.raises(shim.UnknownNameError, match="known: native, p, reference"):
        bind(op, "cpu", "q")


def test_table_has_aligned_lines_and_the_search_path(op, scratch):  # noqa: F811
    provider(op, "vendor:x", available=lambda: "libx.so has no symbol x")
    double_native(op, tiny_library(scratch))
    chains = dispatch.resolve([op.name])
    lines = shim.table.text(chains).splitlines()
    assert lines[0] == f"{op.name}   cpu"
    assert lines[1] == "  vendor:x            unavailable  libx.so has no symbol x"
    assert lines[2].startswith("  native:precompiled  unavailable  ")
    assert lines[3].startswith("  native:jit          selected     ")
    assert lines[4] == "  reference           ready"
    assert lines[5] == "search path of libtiny.so"
    assert [line.split("libtiny.so")[1].strip() for line in lines[6:8]] == ["not there", "compiled now"]
    assert lines[8] == "search path of certificates (cpu)"


def test_table_names_whom_nobody_chose(op, scratch):  # noqa: F811
    for name in ("p", "q"):
        provider(op, name, explicit=True)
    provider(double_op("other"), "q", explicit=True)
    line = "not listed above, as each serves only by explicit choice (--provider OP=PROVIDER): "
    lines = shim.table.text(dispatch.resolve([op.name, "other"])).splitlines()
    assert [one for one in lines if line in one] == [f"{line}p, q"]
    lines = shim.table.text(dispatch.resolve([op.name], policy=Policy(providers={op.name: "p"}))).splitlines()
    assert [one for one in lines if line in one] == [f"{line}q"]


def test_ops_that_fall_back_for_one_reason_are_one_warning(op, scratch, caplog):  # noqa: F811
    for one in (op, double_op("other")):
        provider(one, "p", available=lambda: "libp.so is missing")
    for _ in range(2):
        dispatch.resolve([op.name, "other"])
        op(torch.ones(1))
    (told,) = caplog.messages
    assert told.startswith(f"{op.name}, other: served by reference on cpu, as p: libp.so is missing")


def test_table_for_programs(op, scratch):  # noqa: F811
    double_native(op, tiny_library(scratch))
    data = shim.table.as_dict(dispatch.resolve([op.name], policy=Policy("strict")))
    assert data["policy"] == "strict"
    assert data["ops"][0]["selected"] == "native:jit"
    assert data["ops"][0]["candidates"][1]["build"]["arch"]
    assert [place["finding"] for place in data["libraries"][0]["places"]] == ["not there", "compiled now"]
