"""hypothesis strategies over an op's problems, and nothing else that needs hypothesis but `hunt.py`.

Everything shrinks towards the first and fewest: the smallest sizes, float32, no change of values or layouts.
"""

from __future__ import annotations

from hypothesis import strategies as st

from conformance.search.plans import Plan, Several
from conformance.search.problem import Problem


def problems(op: str, plan: Plan) -> st.SearchStrategy[Problem]:
    return st.builds(
        Problem,
        st.just(op),
        st.fixed_dictionaries({name: size(options) for name, options in plan.sizes.items()}).map(plan.fit),
        st.sampled_from(plan.dtypes),
        seed=st.integers(0, 999),
        values=some_of(plan.value_pairs),
        layouts=some_of(plan.layout_pairs),
    ).filter(lambda problem: plan.takes(problem.dtype, problem.values))


def size(options: range | tuple | Several) -> st.SearchStrategy:
    if isinstance(options, Several):
        return st.lists(size(options.members), max_size=options.most)
    if isinstance(options, range):
        return st.integers(options[0], options[-1])
    return st.sampled_from(options)


def some_of(pairs: list[tuple[str, str]]) -> st.SearchStrategy[dict[str, str]]:
    """At most two of the changes, of different arguments: more seldom find more, and shrink worse."""
    return st.lists(st.sampled_from(pairs), max_size=2, unique_by=lambda pair: pair[0]).map(dict)
