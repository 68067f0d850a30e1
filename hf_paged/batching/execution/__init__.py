"""How a step runs: the model, and the adapter it runs with."""
