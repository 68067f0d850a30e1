"""The C++ kernels of `kernels.cpp`: built on first use, loaded with ctypes, absent without complaint.

There is no wheel to match and no torch header to compile: a few seconds of the user's own compiler, once per machine,
kept in `$HF_PAGED_CACHE_DIR`, else `$XDG_CACHE_HOME/hf_paged`, else `~/.cache/hf_paged`. Wherever that cannot work (no
compiler, read-only home, `HF_PAGED_NATIVE=0`), `is_available()` is False and the portable
path of `attention/cpu.py` serves.
"""

from .build import is_available
from .calls import MAX_QUERIES, hash_memory, paged_attention, store, supports, supports_store
from .draws import multinomial
from .prepared import DecodeCall, DecodeFields, StoreCall

__all__ = [
    "MAX_QUERIES",
    "DecodeCall",
    "DecodeFields",
    "StoreCall",
    "hash_memory",
    "is_available",
    "multinomial",
    "paged_attention",
    "store",
    "supports",
    "supports_store",
]
