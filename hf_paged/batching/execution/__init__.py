"""Runs steps: the model with its adapters, graphs, and draft models."""
