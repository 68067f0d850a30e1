"""Continuous batching: many requests, one packed forward per step."""
