"""`python -m hf_paged.inspect MODEL` does the same as `python -m hf_paged inspect MODEL`.
`tools/inspect.py` implements it."""

import sys

from . import rooms

rooms.require("tools", "`hf_paged.inspect`")

from .tools.inspect import *  # noqa: E402, F403
from .tools.inspect import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
