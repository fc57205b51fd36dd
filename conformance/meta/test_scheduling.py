"""Workers that die: their tests are run by others, once, and no run ends with them."""

from types import SimpleNamespace

import pytest

from conformance.scheduling import Scheduling

TESTS = [f"test_cases.py::test_case[{n}]" for n in range(8)]


class Worker:
    """As xdist knows it: a dead one cannot be sent anything."""

    shutting_down = False

    def __init__(self, name):
        self.gateway, self.dead, self.sent = SimpleNamespace(id=name), False, []

    def send_runtest_some(self, indices):
        if self.dead:
            raise OSError("cannot send (already closed?)")
        self.sent += indices

    def shutdown(self):
        self.shutting_down = True


@pytest.fixture
def scheduling():
    """With two workers, each of which has been sent two tests."""
    one = Scheduling(SimpleNamespace(getvalue=lambda _: ["2*popen"], option=SimpleNamespace(loadscopereorder=True)))
    one.workers = [Worker("gw0"), Worker("gw1")]
    for worker in one.workers:
        one.add_node(worker)
        one.add_node_collection(worker, TESTS)
    one.schedule()
    return one


def replaced(scheduling, name):
    worker = Worker(name)
    scheduling.add_node(worker)
    scheduling.add_node_collection(worker, TESTS)
    scheduling.schedule()
    return worker


def test_two_workers_that_die_at_once_cost_their_own_tests_and_no_other(scheduling):
    first, second = scheduling.workers
    begun = {TESTS[worker.sent[0]] for worker in scheduling.workers}
    first.dead = second.dead = True
    assert {scheduling.remove_node(first), scheduling.remove_node(second)} == begun
    others = [replaced(scheduling, name) for name in ("gw2", "gw3")]
    left = {TESTS[index] for worker in others for index in worker.sent}
    left |= {test for unit in scheduling.workqueue.values() for test, done in unit.items() if not done}
    assert left == set(TESTS) - begun


def test_a_worker_that_had_nothing_to_do_when_it_died_is_blamed_for_nothing(scheduling):
    first, second = scheduling.workers
    second.dead = True
    for index in second.sent:  # all that it was sent has been reported, and then it died
        scheduling.mark_test_complete(second, index)
    assert scheduling.remove_node(second) is None
    waiting = {test for unit in scheduling.workqueue.values() for test, done in unit.items() if not done}
    assert waiting == set(TESTS) - {TESTS[index] for worker in (first, second) for index in worker.sent}
