"""Paged KV memory for Hugging Face `generate`: `model.generate(**inputs, cache_implementation="paged")`."""

from .batching.engine import PagedEngine
from .batching.loop import EngineStalledError
from .batching.results import EngineStats, RequestOutput, RequestResult, SequenceResult
from .cache.block_pool import OutOfBlocksError
from .cache.memory import MemoryStats
from .cache.paged_cache import PagedCache
from .config import PagedConfig
from .generation.install import install, uninstall
from .model.registry import Route, check_integrity, free, last_route, memory_stats

__version__ = "0.1.0"

__all__ = [
    "EngineStalledError",
    "EngineStats",
    "MemoryStats",
    "OutOfBlocksError",
    "PagedCache",
    "PagedConfig",
    "PagedEngine",
    "RequestOutput",
    "RequestResult",
    "Route",
    "SequenceResult",
    "check_integrity",
    "free",
    "install",
    "last_route",
    "memory_stats",
    "uninstall",
]

install()
