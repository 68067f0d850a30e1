"""Scheduling: which sequences run in a step, which requests hold blocks, and which wait. Plain
Python: no tensors."""
