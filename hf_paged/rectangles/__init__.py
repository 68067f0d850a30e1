"""Rectangles: padded batches, for models whose forwards cannot be packed, and for prompts whose
rows stay together. Implements `rooms.RectanglesRoom`; imports no other optional package."""

from .capability import choose_layout as choose_layout
from .capability import prepare as prepare
from .capability import reasons_against_call as reasons_against_call
from .runner import make_runner as make_runner
