"""The entry: what a `generate` call with `cache_implementation=\"paged\"` becomes, and one such call."""
