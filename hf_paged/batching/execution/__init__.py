"""Executes scheduled steps: packed or rectangular forwards of the current model."""
