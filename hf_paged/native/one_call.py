"""Computes a batch of sampled requests of `generate_batch` as the rows of one `generate` call."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..attention.switch import NAME
from ..batching.prompt_forms import prompt_ids
from ..cache.block_pool import OutOfBlocksError
from ..config import PagedConfig
from ..interrupts import guarded
from ..model.forwards import compute_device, num_embeddings
from .pending import make_output_ids
from .serving_mode import serving_mode


class EffectiveOptions:
    """The options of a generation config as attributes. An option that is unset there has the value
    of the model's generation config."""

    def __init__(self, model: PreTrainedModel, config: GenerationConfig) -> None:
        self._configs = config, model.generation_config

    def __getattr__(self, name: str) -> Any:
        values = (getattr(config, name) for config in self._configs)
        return next((value for value in values if value is not None), None)


@guarded
def sample_together(
    model: PreTrainedModel,
    inputs: Sequence[Any],
    config: GenerationConfig,
    cb_config: ContinuousBatchingConfig,
    paged_config: PagedConfig,
) -> dict[str, GenerationOutput] | None:
    """Computes the prompts as rows of one `generate` call, for which it changes `config`, and
    returns outputs by id. Rows draw from one random stream, as in plain `generate`. Returns `None`
    for requests that such a call cannot serve: with log-probabilities or a seed, for a model with
    an encoder, without `max_new_tokens`, with more rows than `max_num_seqs`, or with prompts that
    are invalid or never fit into memory."""
    effective = EffectiveOptions(model, config)
    num_sequences = config.num_return_sequences or 1
    if cb_config.return_logprobs or cb_config.seed is not None or model.config.is_encoder_decoder:
        return None
    if len(inputs) * num_sequences > paged_config.max_num_seqs or effective.max_new_tokens is None:
        return None
    # if a prompt is invalid, the engine must serve the requests: it reports the error in the
    # prompt's output
    try:
        prompts = [prompt_ids(prompt, None) for prompt in inputs]
        vocab_size = num_embeddings(model)
    except ValueError:
        return None
    if not all(prompt and min(prompt) >= 0 and max(prompt) < vocab_size for prompt in prompts):
        return None
    created_at = time.perf_counter()
    rows = [torch.tensor(prompt, device=compute_device(model)) for prompt in prompts]
    pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
    input_ids = pad(rows, padding_value=effective.pad_token_id or 0)
    config.cache_implementation = NAME
    config.cache_config = paged_config.to_dict()
    try:
        with serving_mode(model):
            sequences = model.generate(
                input_ids=input_ids,
                attention_mask=pad([torch.ones_like(row) for row in rows]),
                generation_config=config,
            )
            generated_tokens = sequences[:, input_ids.shape[1] :].tolist()
    except (IndexError, OutOfBlocksError):  # too long: the engine fails only these requests
        return None
    ended_at = time.perf_counter()
    eos = effective.eos_token_id
    eos_ids = set() if eos is None else {*torch.as_tensor(eos).flatten().tolist()}
    outputs: dict[str, GenerationOutput] = {}
    for index, prompt in enumerate(prompts):
        for output_id in make_output_ids(f"req_{index}", num_sequences):
            tokens = generated_tokens[len(outputs)]
            # without the padding after an end-of-sequence token
            lengths = (length for length, token in enumerate(tokens, 1) if token in eos_ids)
            outputs[output_id] = GenerationOutput(
                output_id,
                prompt,
                tokens[: next(lengths, None)],
                status=RequestStatus.FINISHED,
                created_time=created_at,
                lifespan=(created_at, ended_at),
            )
    return outputs
