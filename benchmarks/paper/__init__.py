"""Reproduces the tables of the papers behind this package on our system, each row beside the
published figure."""
