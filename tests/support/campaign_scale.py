"""Scale of the tests that `benchmarks/attack.py` repeats: a few cases in the suite, thousands in the campaign."""

import os

CAMPAIGN = bool(os.environ.get("RATCHET_ATTACK"))
"""True where the campaign runs, which tries everything; the suite tries a part."""


def scaled(name: str, suite: int) -> int:
    """A number of cases: the campaign's (`RATCHET_ATTACK_<NAME>`), or the suite's."""
    return int(os.environ.get(f"RATCHET_ATTACK_{name}", suite))
