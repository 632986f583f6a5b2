"""The fastest plan that fits in memory and keeps the loss: `zpp-lab plan --fastest`.

`space` lists what the engines can run, `parts` sums memory and floors of time, `limits` says what
a study allows, `fastest` predicts the time of what is left and chooses, `shown` explains.
"""
