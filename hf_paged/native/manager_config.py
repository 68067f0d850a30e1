"""The configs of a continuous-batching manager: a `PagedConfig` from a `ContinuousBatchingConfig`,
and the generation config of each request."""

from __future__ import annotations

import copy
from dataclasses import MISSING, fields
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..batching.arguments import check_generation_config
from ..config import PagedConfig
from .one_call import EffectiveOptions

MAPPED_FIELDS: dict[str, str] = {
    "page_size": "`block_size`, if it differs from the default, or if `num_blocks` is given",
    "block_size": "`block_size`; deprecated name of `page_size` since transformers 5.18",
    "num_blocks": "`num_blocks`",
    "max_batch_tokens": "`max_num_batched_tokens`",
    "max_memory_percent": "`memory_fraction`",
    "max_requests_per_batch": "`max_num_seqs`",
    "allow_block_sharing": "`prefix_caching`",
    "use_cuda_graph": "`capture`, which is off only if both of transformers' paths are False",
    "scheduler_type": (
        '`"fifo"` or `"prefill_first"`, which sets the limit on prompt tokens beside decodes'
        " (`max_chunk_tokens`) to `max_num_batched_tokens`"
    ),
    "return_logprobs": "`return_logprobs` of every request",
    "seed": (
        "the i-th request without a `seed` draws as `generate` does after"
        " `torch.manual_seed(seed + i)`"
    ),
    "cpu_offload_space": (
        '`preemption`: `"recompute"` if it is 0, else `"swap"`, which allocates host memory when it'
        " preempts requests"
    ),
    "max_queue_size": "requests that may wait for the engine's thread; 0 means any number",
}
"""The fields of `ContinuousBatchingConfig` that have an effect, each with the option that it sets,
or with its effect."""

IGNORED_FIELDS: dict[str, str] = {
    "max_blocks_per_request": "sizes the block table of a flash kernel; hf_paged's tables grow",
    "use_async_batching": "the engine launches the next step ahead whenever it can",
    "q_padding_interval_size": "pads the inputs of CUDA graphs; the engine chooses its own sizes",
    "kv_padding_interval_size": "pads the inputs of CUDA graphs; the engine reads block tables",
    "varlen_compile_config": "compiles transformers' own forward; tokens do not depend on it",
    "decode_compile_config": "compiles transformers' own forward; tokens do not depend on it",
    "default_compile_level": "compiles transformers' own forward; tokens do not depend on it",
    "use_default_compile_configs": "deprecated name of `default_compile_level`",
    "safety_margin": (
        "blocks that transformers' scheduler leaves free; the engine preempts requests instead"
    ),
    "auto_switch_to_flash": "ignored: hf_paged sets and restores its own attention",
    "cpu_offload_space_safety_threshold": "bounds a buffer that hf_paged does not allocate",
    "per_request_processors": "each request always has its own options",
    "drop_unsupported_processors": "all processors work as in `generate`, so none is dropped",
    "disable_nccl_graph_mixing": "for tensor parallelism, which managers do not support",
    "cpu_group_timeout": "for tensor parallelism, which managers do not support",
    "max_cached_graphs": "deprecated and unused in transformers",
}
"""The other fields, each with its effect in transformers or the reason why it is ignored. They tune
transformers' own implementation and change no token."""

IGNORED_OUTPUTS = (
    *("return_dict_in_generate", "output_scores", "output_logits"),
    *("output_attentions", "output_hidden_states"),
)
"""Generation options for outputs that only `generate` returns. transformers' managers ignore them,
too."""

_default_config: list[PagedConfig] = [PagedConfig()]  # one config, which `set_default` replaces


def set_default(config: PagedConfig) -> None:
    """Sets the default `PagedConfig` of managers. The `cache_config` of a generation config
    replaces the default, and fields of a `ContinuousBatchingConfig` override either."""
    _default_config[:] = [config]


def make_paged_config(
    cb_config: ContinuousBatchingConfig, cache_config: PagedConfig | dict[str, Any] | None = None
) -> PagedConfig:
    """Returns `cache_config`, or the default config if it is `None`, overridden by the fields of a
    `ContinuousBatchingConfig` that differ from their defaults. Raises `ValueError` if hf_paged does
    not know one of these fields, or cannot serve a value."""
    changed_fields = _changed_fields(cb_config)
    unknown = sorted(set(changed_fields) - set(MAPPED_FIELDS) - set(IGNORED_FIELDS))
    if unknown:
        raise ValueError(
            f"`ContinuousBatchingConfig` has fields that hf_paged does not know, {unknown}: leave"
            " them out"
        )
    scheduler = changed_fields.get("scheduler_type", "fifo")
    if scheduler not in ("fifo", "prefill_first"):
        raise ValueError(f"`scheduler_type` is {scheduler!r}: it must be 'fifo' or 'prefill_first'")
    base_config = _default_config[0] if cache_config is None else PagedConfig.coerce(cache_config)
    options = base_config.to_dict()
    options_by_field = {
        "num_blocks": "num_blocks",
        "max_batch_tokens": "max_num_batched_tokens",
        "max_memory_percent": "memory_fraction",
        "max_requests_per_batch": "max_num_seqs",
        "allow_block_sharing": "prefix_caching",
    }
    options |= {
        option: changed_fields[field]
        for field, option in options_by_field.items()
        if field in changed_fields
    }
    page_size = getattr(cb_config, "page_size", None) or getattr(cb_config, "block_size", None)
    if {"page_size", "block_size", "num_blocks"} & set(changed_fields):
        # `num_blocks` counts blocks of transformers' page size
        options["block_size"] = page_size
    if "use_cuda_graph" in changed_fields:
        options["capture"] = any(cb_config.cuda_graph_booleans)
    if "cpu_offload_space" in changed_fields:
        options["preemption"] = "recompute" if changed_fields["cpu_offload_space"] == 0 else "swap"
    if scheduler == "prefill_first":
        options["max_chunk_tokens"] = options["max_num_batched_tokens"]
    try:
        return PagedConfig(**options)
    except ValueError as error:
        raise ValueError(f"the `ContinuousBatchingConfig` cannot be served: {error}") from None


def _changed_fields(cb_config: ContinuousBatchingConfig) -> dict[str, Any]:
    """Returns the values of the fields that differ from their defaults, by name."""
    values = {}
    for field in fields(cb_config):
        default = None if field.default is MISSING else field.default
        value = getattr(cb_config, field.name)
        if value != default:
            values[field.name] = value
    return values


def make_request_config(
    model: PreTrainedModel, config: GenerationConfig, options: dict[str, Any]
) -> GenerationConfig:
    """Returns the generation config of one request: `config` overridden by `options`, and limited
    to the model's maximum length if no config limits the length. Raises `ValueError` for options
    that `GenerationConfig` does not have, and if nothing limits the length."""
    check_generation_config(options)
    request_config = copy.deepcopy(config)
    for name in (
        "cache_implementation",
        "cache_config",
        "compile_config",
        "continuous_batching_config",
    ):
        # options for `generate` and transformers' own loop, not for the engine
        if hasattr(request_config, name):
            setattr(request_config, name, None)
    for name, value in options.items():
        setattr(request_config, name, value)
    for name in IGNORED_OUTPUTS:
        setattr(request_config, name, False)  # `None` would stand for the model's value
    effective = EffectiveOptions(model, request_config)
    if (effective.num_beams or 1) == 1 and not effective.do_sample:
        request_config.num_return_sequences = 1  # greedy sequences would all be equal
    else:
        request_config.num_return_sequences = request_config.num_return_sequences or 1
    if effective.max_new_tokens is None and effective.max_length is None:
        request_config.max_length = find_max_length(model)
        if request_config.max_length is None:
            raise ValueError(
                "neither the call nor the model's config limits the length: pass `max_new_tokens`"
            )
    return request_config


def find_max_length(model: PreTrainedModel) -> int | None:
    """Returns the maximum length that the model's config allows, in tokens; `None` if it sets
    none."""
    text_config = model.config.get_text_config(decoder=True)
    max_length: int | None = getattr(text_config, "max_position_embeddings", None)
    return max_length
