"""Paged KV memory for Hugging Face `generate`: `model.generate(**inputs, cache_implementation="paged")`."""

from .cache.block_pool import OutOfBlocksError
from .cache.memory import MemoryStats
from .cache.paged_cache import PagedCache
from .config import PagedConfig
from .generation import install, uninstall
from .registry import Route, check_integrity, free, last_route, memory_stats

__version__ = "0.1.0"

__all__ = [
    "MemoryStats",
    "OutOfBlocksError",
    "PagedCache",
    "PagedConfig",
    "Route",
    "check_integrity",
    "free",
    "install",
    "last_route",
    "memory_stats",
    "uninstall",
]

install()
