"""
Paged KV memory for Hugging Face `generate`: the same tokens, with K/V in blocks of a pool that rows share.

    model.generate(**inputs, cache_implementation="paged")            # any model; threads' calls share forwards
    model.generate(**inputs, cache_implementation="paged", cache_config={"num_blocks": 4096})  # with a limit
    hf_paged.last_route(model), hf_paged.memory_stats(model)          # how the call was served, and why; bytes

    with hf_paged.PagedEngine(model, tokenizer=tokenizer) as engine:  # many requests: continuous batching
        results = engine.generate(["a prompt", "another"], {"max_new_tokens": 64})

`PagedConfig` has every option. `PagedCache` is a `transformers.Cache` for decoding loops that you write yourself.
"""

from .batching.engine import PagedEngine
from .batching.loop import EngineStalledError
from .batching.ranks import serve_rank
from .batching.results import EngineStats, RequestOutput, RequestResult, SequenceResult
from .cache.block_pool import OutOfBlocksError
from .cache.budget import budget
from .cache.memory import MemoryStats
from .cache.paged_cache import PagedCache
from .config import PagedConfig, PrefixTiers, VirtualStorage
from .generation.install import install, install_of_environment, uninstall
from .model.ranks import RankLostError
from .model.registry import Route, check_integrity, free, last_route, memory_stats

__version__ = "0.2.0"

__all__ = [
    "EngineStalledError",
    "EngineStats",
    "MemoryStats",
    "OutOfBlocksError",
    "PagedCache",
    "PagedConfig",
    "PagedEngine",
    "PrefixTiers",
    "RankLostError",
    "RequestOutput",
    "RequestResult",
    "Route",
    "SequenceResult",
    "VirtualStorage",
    "budget",
    "check_integrity",
    "free",
    "install",
    "last_route",
    "memory_stats",
    "serve_rank",
    "uninstall",
]

install_of_environment()
