"""From logits to tokens: transformers' decoding loops, suspended between two forwards."""
