"""The entry point: patches `generate` for `cache_implementation=\"paged\"` and runs such calls."""
