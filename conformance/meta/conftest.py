"""Fixtures for the tests of the shim."""

import pytest

from conformance.meta.looking import edit, look, model  # noqa: F401 - fixtures
from shim import dispatch, health, plugins, policy, variables
from shim.op import temporary


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A clean shim: ops and providers registered by the test are forgotten, no OPSHIM_ variable is set but the cache,
    the policy is the default; gives the test's folder."""
    for name in (*variables.NAMES, *variables.INTERNAL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPSHIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(plugins, "_idle", {})
    policy.set_policy(None)
    with temporary():
        yield tmp_path
    policy.set_policy(None)
    health.counters.open(None)
