"""The entry point: replaces methods of transformers, and runs `generate` calls with
`cache_implementation="paged"`."""
