"""The peer: DeepSpeed's ZeRO-3 and ZeRO++ behind the same interface."""
