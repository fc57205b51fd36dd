"""Search: problems that nobody thought of, drawn by hypothesis, and the smallest of those that fail.

    problem     one call as data, and what makes it a case
    plans       per op, what may be drawn
    strategies  plans as hypothesis strategies
    hunt        the search and its cases
    replay      failures of every kind as files, and `runner.py replay`
"""

from conformance.search.problem import Problem

__all__ = ["Problem"]
