"""The conformance suite. SUITE is raised where cases or judgement change so that older results no longer count."""

SUITE = 5
