"""Tools beside generation: pictures of the memory, and what it would be for a model."""
