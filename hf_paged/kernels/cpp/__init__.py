"""The C++ kernels of `kernels.cpp`: built on first use, loaded with ctypes, absent where there is no compiler.

There is no wheel to match and no torch header to compile: a few seconds of the user's own compiler, once per machine,
which the log says. The library is kept in `$HF_PAGED_CACHE_DIR`, else `$XDG_CACHE_HOME/hf_paged`, else
`~/.cache/hf_paged`: an absolute path to a folder of the user's own with mode 700, which no other user can swap for
another (`private.py`), under a name that holds the hash of its content. What is cut short, altered or not the user's
is compiled again, never loaded. Where the folder does not serve, a warning says why and every process compiles for
itself, into a temporary folder that is gone once the library is loaded. Wherever that cannot work either (no
compiler, `HF_PAGED_CPP=0`), `is_available()` is False and the portable path of `attention/backends/gather.py` serves;
without a compiler a warning says so.
"""

from .build import is_available
from .draws import multinomial
from .hash import hash_memory

__all__ = ["hash_memory", "is_available", "multinomial"]
