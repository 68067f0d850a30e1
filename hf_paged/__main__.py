"""`python -m hf_paged`, whose commands are in `tools/commands.py`."""

import sys

from . import rooms

if __name__ == "__main__":
    rooms.require("tools", "`python -m hf_paged`")
    from .tools.commands import main

    sys.exit(main())
