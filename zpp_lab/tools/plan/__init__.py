"""What a run will send, hold and take, before it starts."""
