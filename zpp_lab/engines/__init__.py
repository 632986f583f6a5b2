"""A recipe on a cluster. `base.py` says what the trainer expects of an engine.

`virtual/` runs all ranks in one process, `fsdp/` one process a rank, `deepspeed/` is the peer that
they are compared with; `optim/` has AdamW and its states. A **unit** is what travels together: the
parameters of one block of the model. The **root** unit holds what is left. Our engines agree to
the bit on losses, norms, weights and telemetry.
"""
