"""One run, from its start to its summary: inputs, resume, steps, evaluation, end.

`trainer.py` is the step loop. `launch/` starts its ranks and ends them with the run; `memory/`
estimates what each rank will hold. A run in **time slices** stops between steps and resumes later.
"""
