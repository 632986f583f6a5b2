"""The fastest plan that fits in memory and keeps the loss: `zpp-lab plan --fastest`.

`space` lists what the engines can run, `limits` says what a study allows, `fastest` sums memory and
floors of time, predicts what is left and chooses, `shown` explains.
"""
