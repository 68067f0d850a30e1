"""Which road `generate` takes with a model, and which kernels: asked of the code that decides it in a call."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from .. import compat
from ..attention import backends
from ..attention.call import AttentionCall
from ..attention.switch import NAME, foreign_attention, model_attention, switchable_configs
from ..batching.factory import Layout, choose_layout, empty_cache
from ..cache.layers import PagedLayer
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.storage import KVBlocks
from ..config import PagedConfig
from ..generation.call import prepared
from ..model.self_check import first_line
from ..step import StepMetadata
from .footprint import GroupFootprint
from .models import build

MAX_CHECK_BYTES = 2 << 30  # of the weights of the model whose forwards are compared
_CHUNK = 64  # tokens of a prefill chunk


class Road(NamedTuple):
    """How a `generate` call with `cache_implementation="paged"` would go."""

    name: str  # as in `Route`: "engine", "hf_loop" or "plain"; "undecided" between the first two
    reason: str
    in_place: bool  # whether attention can read the blocks where they are
    kernels: dict[str, dict[str, str]]  # by layer group, the backend of a decode and of a prefill chunk


def find_road(model: PreTrainedModel, groups: list[GroupFootprint], device: torch.device) -> Road:
    """The road of a model, which is on the meta device, with these layer groups, if it ran on `device`."""
    built, reason = _built_caches(model)
    if not built:
        return Road("plain", reason, False, {})
    in_place = bool(switchable_configs(model.modules())) and foreign_attention(model.modules()) is None
    kernels = {group.name: _kernels(group, device) for group in groups} if in_place else {}
    unsupported = "the model has an encoder"
    if len(built) == 1:
        checked = _check_forwards(model, built[0])
        if checked is None:
            reason = "the first call compares a few forwards and decides, which was not done here: the model is large"
            return Road("undecided", reason, in_place, kernels)
        layout, what = checked
        if layout.unsupported_reason is None or layout.sides.rows:
            padded = "" if layout.sides.prompts else "; padded prompts under transformers' own loop"
            return Road("engine", f"{layout.reason} ({what}){padded}", in_place, kernels)
        unsupported = layout.unsupported_reason
    if not groups:
        how = "nothing of its cache is in blocks"
    elif in_place:
        how = "blocks are read in place"
    else:
        own = model_attention(model.config.get_text_config(decoder=True))
        how = f"its own {own} attention gets gathered keys and values"
    return Road("hf_loop", f"{how}; not on the engine: {unsupported}", in_place, kernels)


def _built_caches(model: PreTrainedModel) -> tuple[list[PagedCache], str]:
    """The caches that `generate` would put in blocks, and why there are none."""
    config = copy.deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()
    config.cache_implementation, config.use_cache = NAME, True
    token = prepared.set(None)
    try:
        compat.prepare_cache(model, config, {}, GenerationMode.GREEDY_SEARCH, 1, 16)
        call = prepared.get()
        return (call.built, call.reason) if call is not None else ([], "the model prepares its cache by itself")
    except Exception as error:
        return [], f"its cache cannot be prepared: {first_line(error)}"
    finally:
        prepared.reset(token)


def _check_forwards(model: PreTrainedModel, cache: PagedCache) -> tuple[Layout, str] | None:
    """The layout that the engine's checks choose, which compare forwards, and of what; `None` if it is too large."""
    config: PreTrainedConfig
    for config, what in (
        (model.config, "checked on random weights"),
        (_cut(model.config, cache), "checked on random weights and fewer layers"),
    ):
        try:
            if build(config, type(model), torch.float32, "meta").get_memory_footprint() > MAX_CHECK_BYTES:
                continue
            with torch.random.fork_rng([]):
                torch.manual_seed(0)
                small = build(config, type(model), torch.float32, "cpu")
        except ValueError:
            continue
        return choose_layout(small, empty_cache(small, PagedMemory(PagedConfig()))), what
    return None


def _cut(config: PreTrainedConfig, cache: PagedCache) -> PreTrainedConfig:
    """
    The configuration with as many layers as have one of each kind, and narrow where that changes nothing of keys and
    values: the same modules in a small model.
    """
    config = copy.deepcopy(config)
    text: Any = config.get_text_config(decoder=True)
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig) and part is not text and hasattr(part, "num_hidden_layers"):
            part.num_hidden_layers = 1
    kinds = [(type(layer), layer.group.spec if isinstance(layer, PagedLayer) else None) for layer in cache.layers]
    before = text.num_hidden_layers
    count = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    text.num_hidden_layers = count = min(max(2, count), before)
    most = {"intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 4096}
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:count])
        elif isinstance(value, int) and name in most:
            setattr(text, name, min(value, most[name]))
        elif isinstance(value, int) and name.endswith("token_id"):
            setattr(text, name, min(value, most["vocab_size"] - 1))
    return config


def _kernels(group: GroupFootprint, device: torch.device) -> dict[str, str]:
    """The backend that `backends.select` chooses for states of the group's first layer."""
    first = group.blocks[0]
    keys, values = (torch.empty_like(states, device=device) for states in (first.keys, first.values))
    blocks = KVBlocks.allocate(1, group.block_size, keys, values)
    if group.is_latent:  # as `LatentTensor.absorb` gives them
        blocks = blocks.latents
    tables = torch.zeros(1, 1, dtype=torch.int32, device=device)
    found = {}
    for name, length in (("decode", 1), ("prefill chunk", _CHUNK)):
        step = StepMetadata.rectangle(tables, (length,), group.block_size, query_len=length, window=group.spec.window)
        query = blocks.keys.new_zeros(length, blocks.keys.shape[1], blocks.keys.shape[3])
        with torch.no_grad():
            chosen = backends.select(AttentionCall(query, blocks, step, scale=1.0))
        found[name] = next(known for known, backend in backends.BACKENDS.items() if backend is chosen)
    return found
