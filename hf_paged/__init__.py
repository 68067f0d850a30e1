"""Paged KV memory for Hugging Face `generate`: the same tokens, with keys and values in blocks of a
pool that rows share.

    # calls of several threads share forwards if the model allows it
    model.generate(**inputs, cache_implementation="paged")
    # with a limit
    model.generate(**inputs, cache_implementation="paged", cache_config={"num_blocks": 4096})
    # how the last call was served, and why; the bytes of the model's keys and values
    hf_paged.last_route(model), hf_paged.memory_stats(model)

    # many requests: continuous batching
    with hf_paged.PagedEngine(model, tokenizer=tokenizer) as engine:
        results = engine.generate(["a prompt", "another"], {"max_new_tokens": 64})

`PagedConfig` has every option. `PagedCache` is a `transformers.Cache` for decoding loops that you
write yourself.

The public names (`help(hf_paged.PagedEngine)` explains one):

    install, uninstall        add "paged" to `generate` (importing hf_paged does so); undo it
    last_route, Route         the route of a model's last call, and the reason for it
    memory_stats, MemoryStats bytes of a model's keys and values, in blocks and in a plain cache
    free                      frees a model's pool
    budget                    limits the pools of all models together, in bytes
    check_integrity           checks a model's pool against its block tables
    PagedConfig               every option of the memory and of the engine
    PrefixTiers               the option for host memory and disk below the prefix cache
    VirtualStorage            the option for rows that are also contiguous in virtual addresses
    PagedEngine               continuous batching of many requests on one model
    RequestOutput             new tokens of a request, as `stream` and `step` return them
    RequestResult             a finished request: its sequences, error, timings
    SequenceResult            one generated sequence: token ids, text, log-probabilities
    EngineStats               an engine's state and counters
    PagedCache                a `transformers.Cache` whose keys and values are in blocks
    serve_rank                computes an engine's steps in the other processes of a sharded model
    OutOfBlocksError          raised when a limit, or free memory, allows too few blocks
    EngineStalledError        raised when many steps in a row produced no token
    RankLostError             raised when a process of a sharded model has ended or is out of step
"""

import sys as _sys
from types import ModuleType as _Module
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.3.1"


def _is_command() -> bool:
    """Whether Python imports the package to run `python -m hf_paged`. Of its commands, only
    `inspect` needs torch and transformers, so this import skips them. Any other import calls
    `install`."""
    # while Python looks for the module, `sys.argv` begins with "-m" instead of the module's path;
    # in `sys.orig_argv`, the module's name precedes the remaining arguments
    return _sys.argv[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv) :][0] in (
        "hf_paged",
        "-mhf_paged",
    )


# `as` makes names public for type checkers.
if not _is_command():
    from .batching.engine import PagedEngine as PagedEngine
    from .batching.progress import EngineStalledError as EngineStalledError
    from .batching.results import EngineStats as EngineStats
    from .batching.results import RequestOutput as RequestOutput
    from .batching.results import RequestResult as RequestResult
    from .batching.results import SequenceResult as SequenceResult
    from .cache.block_pool import OutOfBlocksError as OutOfBlocksError
    from .cache.budget import budget as budget
    from .cache.memory_stats import MemoryStats as MemoryStats
    from .cache.paged_cache import PagedCache as PagedCache
    from .config import PagedConfig as PagedConfig
    from .config import PrefixTiers as PrefixTiers
    from .config import VirtualStorage as VirtualStorage
    from .generation.install import install as install
    from .generation.install import install_from_environment as _install_from_environment
    from .generation.install import uninstall as uninstall
    from .model.registry import Route as Route
    from .model.registry import check_integrity as check_integrity
    from .model.registry import free as free
    from .model.registry import last_route as last_route
    from .model.registry import memory_stats as memory_stats
    from .model.sharding import RankLostError as RankLostError
    from .model.sharding import serve_rank as serve_rank

    _install_from_environment()

# A star import takes every public name of this module. Submodules among these names would replace a
# user's `config`, `model` or `cache`. An `__all__` instead would make `help(hf_paged)` print every
# class in full.
for _name in [
    name for name, value in globals().items() if isinstance(value, _Module) and name[:1] != "_"
]:
    del globals()[_name]

if not _TYPE_CHECKING:

    def __getattr__(name: str) -> _Module:
        """Returns a submodule that has been imported. The loop above has deleted its name."""
        if (module := _sys.modules.get(f"{__name__}.{name}")) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return module
