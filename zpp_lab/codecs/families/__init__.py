"""Our codecs, a file for each family: `block.py` rounds every element, `topk.py` keeps a few."""
