"""What the paged memory would be for a model, found without its weights: `python -m hf_paged.inspect MODEL`."""
