"""What user training loops need of a sharded model: its steps followed (`loop.py`), state in host
memory (`placed.py`), CUDA graphs (`graphed.py`), and what Hugging Face's loops ask."""
