"""What is known about a model: how it may run, whether it has changed, its pool and last route."""
