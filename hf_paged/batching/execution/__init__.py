"""Executes scheduled steps: forwards of the current model."""
