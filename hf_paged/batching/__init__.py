"""Continuous batching: many requests, one packed forward a step."""
