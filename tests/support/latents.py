"""A small model with multi-head latent attention."""

from __future__ import annotations

import functools

from tests.support.forwards import fresh

build_deepseek = functools.partial(fresh, "DeepseekV3ForCausalLM")
