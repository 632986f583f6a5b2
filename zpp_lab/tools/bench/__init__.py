"""Benchmarks: what kernels and collectives cost on this machine."""
