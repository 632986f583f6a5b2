"""The runs of a study: planned, queued, placed, started and shown.

`plan.py` composes all configs first, `queue.py` starts runs in order, on the **places** of this
machine (`places.py`) or through a launcher of Hydra's (`batch.py`).
"""
