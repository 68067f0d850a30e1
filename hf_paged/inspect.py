"""The command `python -m hf_paged.inspect MODEL`: what the paged memory would be for a model, without its weights."""

import sys

from .tools.inspect.command import main

if __name__ == "__main__":
    sys.exit(main())
