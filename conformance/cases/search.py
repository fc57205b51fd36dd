"""A search per op and level (`conformance/search`)."""

from conformance.search.hunt import cases

CASES = cases()
