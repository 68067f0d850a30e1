"""Logits to tokens: transformers' decoding loops, stopped between two forwards."""
