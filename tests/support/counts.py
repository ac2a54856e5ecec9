"""How much a test tries of what multiplies out, as counts.h has it for C++: in `./dev test` a part in which each value is met, in
`./dev test --full`, which sets LM_COUNTS=full, all of it."""

import os

FULL = os.environ.get("LM_COUNTS") == "full"


def some_of(*cases, short=1):
    """Parameters of a test: the first of them in the short tier."""
    return list(cases if FULL else cases[:short])


def alternating(one, other):
    """Each two of both; in the short tier each of `one` with one of `other` in turn, so that each of `other` comes, too."""
    other = list(other)
    return [(a, b) for i, a in enumerate(one) for j, b in enumerate(other) if FULL or (i + j) % len(other) == 0]
