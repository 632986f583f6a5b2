"""One run, from its start to its summary: inputs, resume, steps, evaluation, end.

`trainer.py` is the step loop. `launch/` starts its ranks and sees that none outlives the run;
`memory/` says what each rank will hold. A run in **pieces** stops between steps and goes on later.
"""
