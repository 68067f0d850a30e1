"""Facts about a model: how it may run, whether it has changed, its pool and its last route."""
