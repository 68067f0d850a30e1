"""What a model is: whether it may run packed, and whether it is what it was."""
