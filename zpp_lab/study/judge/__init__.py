"""From finished runs to verdicts: statistics of paired seeds, families of tests, effects.

A **gap** is an arm's held-out loss minus the baseline's of the same seed, in nats. The **margin**
is the gap that still does not matter. A **look** is a judgement of a study that may add seeds.
**Controls** are arms that test the instrument; the verdict of two kinds is known before. A
**composite** is a mean over arms' gaps that the study declares.
"""
