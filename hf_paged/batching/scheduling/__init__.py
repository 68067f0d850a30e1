"""Scheduling: which sequences run in a step, which requests hold blocks or wait. Plain Python: no
tensors."""
