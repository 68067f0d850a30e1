"""The tables of the papers that this package builds on, on our own system, each row beside the published figure."""
