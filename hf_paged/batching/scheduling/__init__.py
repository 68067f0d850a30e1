"""Which sequences run in a step, who holds blocks and who waits. Plain Python: no tensors."""
