"""Continuous batching: each step computes tokens of many requests, if possible in one forward."""
