"""Facts about a model: how it may be run, and whether it has changed."""
