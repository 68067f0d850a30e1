"""The entry point of `python -m hf_paged`. `tools/commands.py` implements the commands."""

import sys

from . import rooms

if __name__ == "__main__":
    rooms.require("tools", "`python -m hf_paged`")
    from .tools.commands import main

    sys.exit(main())
