"""Scheduling: which sequences run in a step, and which requests hold blocks or wait. Plain Python:
no tensors."""
