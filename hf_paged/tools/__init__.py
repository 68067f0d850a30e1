"""Tools beside generation: pictures of the memory, the memory that a model would need, metrics,
serving."""
