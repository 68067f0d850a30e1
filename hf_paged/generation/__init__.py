"""The entry point: replaces methods of `generate`, and runs calls with
`cache_implementation="paged"`."""
