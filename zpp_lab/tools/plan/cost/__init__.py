"""What a training step costs in time, before it runs: `predict(config, machine, link_gbps)`.

A **machine** is a file of measured figures. A step is tasks on lanes that share GPU and links.
"""
