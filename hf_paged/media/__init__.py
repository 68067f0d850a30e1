"""Prompts with images, audio, embeddings or explicit positions, for models that run packed: the
model's own forward computes the prompts, and packed steps continue them. Implements
`rooms.MediaRoom`; imports no other optional package."""

from .checks import check as check
from .checks import prepare as prepare
from .steps import position_axes as position_axes
from .steps import run_prompts as run_prompts
