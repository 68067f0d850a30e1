"""Text and tables of results in the documentation (`benchmarks.readme`) that are more than what a
command prints."""
