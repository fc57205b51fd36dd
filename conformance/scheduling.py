"""How pytest-xdist spreads the tests: to whoever is free; and what is left of a worker that died, to another."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling


class Scheduling(LoadScopeScheduling):
    """Every test is a unit of its own, but those of one file of conformance/serving, or of test_workers.py, stay
    together: they share engines, or one run. (xdist's own loadgroup does that by marks, but has no effect under this pytest.)"""

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return file if file.startswith(("conformance/serving/", "conformance/meta/test_workers")) else nodeid

    def __init__(self, *args):
        super().__init__(*args)
        self.unsent = {}  # by worker

    def _assign_work_unit(self, node):
        """The worker may have died beside another, which is heard of later: what it was not sent is others' then."""
        try:
            super()._assign_work_unit(node)
        except OSError:
            self.unsent.setdefault(node, []).append(next(reversed(self.assigned_work[node])))

    def remove_node(self, node):
        """The test during which a worker died, if one did; xdist would run it again, and what was done before."""
        for scope in self.unsent.pop(node, ()):
            self.workqueue[scope] = self.assigned_work[node].pop(scope)
        work = self.assigned_work[node] = {
            scope: unit for scope, unit in self.assigned_work[node].items() if not all(unit.values())
        }
        for scope, unit in work.items():
            culprit = next(nodeid for nodeid, done in unit.items() if not done)
            unit[culprit] = True
            if all(unit.values()):
                del work[scope]
            super().remove_node(node)
            return culprit
        return super().remove_node(node)

    def _reschedule(self, node):
        """A worker that has just replaced another gets work once it has collected the tests. A worker holds its last
        test back until it hears what follows: so it gets two, or where there are no more, all hear that nothing does."""
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
        if not self.workqueue:
            for other in self.nodes:
                if other in self.registered_collections:
                    super()._reschedule(other)
