"""Holm's correction: several arms tested at once must not multiply the chance of a false claim.

Written out because statsmodels' `multipletests` takes seconds to import and collects garbage at
every call, and a study corrects at every look; the tests hold it against that function.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Corrected p-values by name (Holm 1979, Scand. J. Stat. 6).

    An arm without a p-value yet stays None, and counts in the family as if it were 1: the
    correction does not change when its runs come in.
    """
    values = np.array([1.0 if p is None else p for p in p_values.values()])
    order = np.argsort(values)
    steps = values[order] * np.arange(values.size, 0, -1)
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    pairs = zip(p_values.items(), corrected, strict=True)
    return {name: None if p is None else float(c) for (name, p), c in pairs}
