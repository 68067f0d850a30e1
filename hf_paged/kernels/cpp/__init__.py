"""The C++ kernels of `kernels.cpp`: built on first use with the user's own compiler, loaded with ctypes.

The library is kept in `$HF_PAGED_CACHE_DIR`, else `$XDG_CACHE_HOME/hf_paged`, else `~/.cache/hf_paged`, a folder that
no other user can swap for another. What is cut short, altered or not the user's is compiled again, never loaded. Where
the folder does not serve, every process compiles for itself, into a temporary folder. Without a compiler, or with
`HF_PAGED_CPP=0`, `is_available()` is False and `attention/backends/gather.py` serves.
"""

from .build import is_available
from .draws import multinomial
from .hash import hash_memory

__all__ = ["hash_memory", "is_available", "multinomial"]
