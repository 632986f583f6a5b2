"""`zpp-lab bench step`: training steps of several recipes over links of several speeds."""


def main(words: list[str]) -> int:
    """Return the command; its parts import torch, which words that are wrong do not wait for."""
    from zpp_lab.tools.bench.step.run import main as command

    return command(words)
