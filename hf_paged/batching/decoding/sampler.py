"""What the engine calls: a request's decoding, and one step of many decodings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ...kernels import cpp
from ...model.capability import LOOP_CONDITION, is_stock
from .base import CHUNK, Decoding, Fetch, SampledTokens, argmax, hits, num_embeddings
from .beam import BeamDecoding
from .processors import together
from .sample import SampleDecoding, logprobs_of

__all__ = ["BeamDecoding", "SampleDecoding", "SampledTokens", "request_decoding", "sample_step"]

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_GENERATE_ONLY = ("output_attentions", "output_hidden_states")
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")
# what a request's config may say of the cache and the forwards
_CACHE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, True),
    "cache_implementation": (None, "paged", "dynamic", "hf_paged"),
    "cache_config": (None,),
    "prefill_chunk_size": (None,),
    "compile_config": (None,),
}


def request_decoding(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    generation_config: GenerationConfig | None = None,
    *,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    streamer: Any = None,
    generator: torch.Generator | None = None,
    tokenizer: Any = None,
    record_logprobs: bool = False,
) -> SampleDecoding | BeamDecoding:
    """
    The decoding of one prompt: what `generate` prepares before its loop, with the model's own methods. The streamer
    gets the new tokens; the prompt is the caller's to put.

    Args:
        input_ids (`list[int]`): The prompt, no padding.
        generation_config ([`GenerationConfig`], *optional*): Over the model's own, which stays as it is.
        logits_processor, stopping_criteria (lists, *optional*): Added to those that the config asks for.
        streamer, generator, record_logprobs: As in [`SampleDecoding`].
        tokenizer (*optional*): Needed for stop strings.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, a mode other than greedy search, sampling and beam
            search, outputs and caches that only `generate` serves, a model whose loop ends in a way of its own, and
            everything that `generate` refuses.
    """
    host: Any = model
    if not is_stock(model, LOOP_CONDITION):
        raise ValueError(
            f"the model has a `{LOOP_CONDITION}` of its own, which says when a whole call ends: call "
            '`model.generate(..., cache_implementation="paged")` instead of an engine'
        )
    ids = _checked(model, input_ids)
    config = _prepared_config(host, ids, generation_config)
    uses_beams = config.num_beams > 1
    if uses_beams and streamer is not None:
        raise ValueError("a streamer cannot be used with beam search, whose tokens are settled only at the end")
    rows = ids.repeat_interleave(max(config.num_beams, config.num_return_sequences), dim=0)
    processors = host._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        logits_processor=LogitsProcessorList(logits_processor or ()),
        device=ids.device,
        model_kwargs={},
    )
    criteria = host._get_stopping_criteria(config, StoppingCriteriaList(stopping_criteria or ()), tokenizer)
    if uses_beams:
        return BeamDecoding(
            model, rows, processors, criteria, config, generator=generator, record_logprobs=record_logprobs
        )
    return SampleDecoding(
        rows, processors, criteria, config, streamer=streamer, generator=generator, record_logprobs=record_logprobs
    )


def _prepared_config(host: Any, ids: Tensor, generation_config: GenerationConfig | None) -> Any:
    """The config as transformers' loops get it, for `(1, length)` ids. Raises `ValueError` on what cannot be served."""
    own = host.generation_config
    if generation_config is not None:
        _check_own(generation_config, own)
    default_max, default_min = (
        getattr(own, name) is None and getattr(generation_config, name, None) is None
        for name in ("max_length", "min_length")
    )
    config, _ = host._prepare_generation_config(generation_config)
    mode = config.get_generation_mode()
    if mode.value not in _MODES:
        raise ValueError(f"generation mode {mode.value!r} is not among those of the engine: {', '.join(_MODES)}")
    if config.token_healing:
        raise ValueError("`token_healing` is served by `generate` only: leave it out")
    for name in (*_GENERATE_ONLY, *_OUTPUTS):  # the model's: they say how `generate` is to answer
        setattr(config, name, False)
    host._validate_generation_mode(mode, config, {})
    host._prepare_special_tokens(config, True, device=ids.device, batch_size=1)
    config = host._prepare_generated_length(
        generation_config=config,
        has_default_max_length=default_max,
        has_default_min_length=default_min,
        model_input_name="input_ids",
        inputs_tensor=ids,
        input_ids_length=ids.shape[1],
    )
    host._validate_generated_length(config, ids.shape[1], default_max)
    return config


def _check_own(config: GenerationConfig, defaults: GenerationConfig) -> None:
    """Raises `ValueError` on options set for a request that an engine could only ignore."""
    names = (*_GENERATE_ONLY, *_OUTPUTS, *_CACHE_OPTIONS)
    values = {name: getattr(config, name, None) for name in names}
    own = {name: value for name, value in values.items() if value != getattr(defaults, name, None)}
    for name in _GENERATE_ONLY:
        if own.get(name):
            raise ValueError(f"`{name}` is served by `generate` only: leave it out of the request's generation config")
    for name in _OUTPUTS:
        if own.get(name):
            raise ValueError(
                f"`{name}` is for `generate`: leave it out of the request's generation config, and ask for "
                "log-probabilities of the new tokens with `return_logprobs=True`"
            )
    for name, harmless in _CACHE_OPTIONS.items():
        if name in own and own[name] not in harmless:
            raise ValueError(
                f"`{name}` is {own[name]!r} in a request's generation config, but all requests share the engine's "
                "memory and forwards, which its `PagedConfig` decides: leave it out"
            )


def _checked(model: PreTrainedModel, input_ids: Sequence[int]) -> Tensor:
    if not len(input_ids):
        raise ValueError("the prompt is empty: pass at least one token id, the model's BOS token for instance")
    vocab_size = num_embeddings(model)
    low, high = min(input_ids), max(input_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"token id {wrong} is outside the vocabulary: ids from 0 to {vocab_size - 1} have an embedding"
        )
    return torch.tensor([list(input_ids)], dtype=torch.long, device=model.device)


# -- one step of many decodings ---------------------------------------------------------------------------------------


@torch.no_grad()
def sample_step(
    ready: Sequence[tuple[Decoding, Tensor]], fetch: Fetch | None = None
) -> list[SampledTokens | BaseException]:
    """
    One step of each decoding with its logits, `(len(open_rows), vocab)`. What decodings of one row have in common runs
    as one batch. An exception, or an interrupt of its caller's own code, becomes the entry of its decoding; the others
    are what they would be without it.

    A decoding with its own generator, or alone in its batch, draws as `torch.multinomial` does; the others draw from
    torch's global random numbers by inverting the distribution function, which takes one number a row.

    Args:
        fetch (`Callable`, *optional*): Brings the tokens of all open rows `(n,)`, in order, to the host, if they are
            chosen together on one device; called at most once.
    """
    results: dict[int, SampledTokens | BaseException] = {}
    alone: list[int] = []
    groups: dict[Hashable, list[int]] = {}
    for place, (decoding, _) in enumerate(ready):
        key = _group(decoding)
        if key is None:
            alone.append(place)
        else:
            groups.setdefault(key, []).append(place)
    if len(alone) + len(groups) > 1 or fetch is None:
        fetch = Tensor.tolist
    for place in alone:
        results[place] = _advance_alone(*ready[place], fetch)
    for places in groups.values():
        members: list[Any] = [ready[place][0] for place in places]
        parts = [ready[place][1] for place in places]
        if len(members) == 1:
            results[places[0]] = _advance_alone(members[0], parts[0], fetch)
            continue
        try:
            chosen = _choose(members, _stack(parts), fetch)
        except Exception:  # one of them must not take the others with it
            found = [_advance_alone(decoding, logits, Tensor.tolist) for decoding, logits in zip(members, parts)]
        else:
            found = _accept(members, chosen)
        results.update(zip(places, found))
    return [results[place] for place in range(len(ready))]


def _group(decoding: Decoding) -> Hashable:
    """Decodings of one group share a batch; `None`: it goes alone."""
    if not isinstance(decoding, SampleDecoding) or decoding.batchable is None:
        return None
    shareable = decoding.batchable
    if not shareable.suffices(decoding.length):
        return None
    return shareable.key, decoding.do_sample


def _advance_alone(decoding: Decoding, logits: Tensor, fetch: Fetch) -> SampledTokens | BaseException:
    try:
        return decoding.advance(logits, fetch) if isinstance(decoding, SampleDecoding) else decoding.advance(logits)
    except BaseException as error:
        return error


def _stack(parts: list[Tensor]) -> Tensor:
    """`(1, vocab)` each, to `(n, vocab)`: a view where they lie one after the other in one tensor."""
    first = parts[0]
    size = first.nbytes
    start = first.data_ptr()
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    if room >= len(parts) * size and first.is_contiguous():
        if all(part.data_ptr() == start + i * size for i, part in enumerate(parts)):
            return first.as_strided((len(parts), first.shape[1]), (first.shape[1], 1))
    return torch.cat(parts)


def _choose(members: list[SampleDecoding], logits: Tensor, fetch: Fetch) -> list[int | Exception]:
    """A token for each member, one row of `(n, vocab)` logits each."""
    records = [i for i, decoding in enumerate(members) if decoding.record_logprobs]
    do_sample = members[0].do_sample
    shareables = [decoding.batchable for decoding in members if decoding.batchable is not None]
    if not (do_sample or records or shareables[0].processors):
        return list(fetch(argmax(logits)))
    logits = logits.to(torch.float32)
    scores = together(logits, shareables)
    chosen: list[int | Exception] = _draw(members, scores, fetch) if do_sample else [*fetch(argmax(scores))]
    records = [i for i in records if isinstance(chosen[i], int)]
    if records:
        tokens = torch.tensor([chosen[i] for i in records], device=logits.device)
        own, processed = logprobs_of(logits[records], tokens), logprobs_of(scores[records], tokens)
        for i, *pair in zip(records, own, processed):
            members[i].logprobs[0].append((pair[0], pair[1]))
    return chosen


def _draw(members: list[SampleDecoding], scores: Tensor, fetch: Fetch) -> list[int | Exception]:
    probs = torch.nn.functional.softmax(scores, dim=-1)  # [n, vocab]
    drawn: list[int | Exception] = [0] * len(members)
    own: list[int] = []
    shared: list[int] = []
    for i, total in enumerate(probs.sum(dim=-1).tolist()):
        if not total > 0:
            drawn[i] = RuntimeError("the scores of the next token contain nan, or no token has a finite one")
        else:
            (shared if members[i].generator is None else own).append(i)
    for i in own:
        generator = members[i].generator
        assert generator is not None
        drawn[i] = int(cpp.multinomial(probs[i : i + 1].to(generator.device), generator))
    if shared:
        tokens = _invert(probs[shared])
        for i, token in zip(shared, fetch(tokens) if len(shared) == len(members) else tokens.tolist()):
            drawn[i] = token
    return drawn


def _invert(probs: Tensor) -> Tensor:
    """Draws an index of each row of `(n, vocab)` probabilities: a chunk of the vocabulary, then an index in it."""
    probs = torch.nn.functional.pad(probs, (0, -probs.shape[1] % CHUNK))
    chunks = probs.unflatten(1, (-1, CHUNK))  # [n, chunks, CHUNK]
    first = _invert_cumulated(chunks.sum(dim=-1).double().cumsum(dim=-1))  # [n]
    inner = chunks[torch.arange(len(first), device=first.device), first]  # [n, CHUNK]
    return first * CHUNK + _invert_cumulated(inner.double().cumsum(dim=-1))


def _invert_cumulated(mass: Tensor) -> Tensor:
    level = torch.rand((len(mass), 1), dtype=torch.double, device=mass.device) * mass[:, -1:]
    # the first index whose mass exceeds the level: never one of no probability
    return torch.searchsorted(mass, level, right=True).squeeze(1).clamp(max=mass.shape[1] - 1)


def _accept(members: list[SampleDecoding], chosen: list[int | Exception]) -> list[SampledTokens | BaseException]:
    stopped = _stopped(members, chosen)
    results: list[SampledTokens | BaseException] = []
    for i, (decoding, token) in enumerate(zip(members, chosen)):
        if not isinstance(token, int):
            results.append(token)
            continue
        try:
            results.append(decoding.accept([token], stopped.get(i)))
        except BaseException as error:
            results.append(error)
    return results


def _stopped(members: list[SampleDecoding], chosen: list[int | Exception]) -> dict[int, bool]:
    """What the stop strings of those that have any say of their new token; equal ones are asked once."""
    groups: dict[Hashable, list[int]] = {}
    for i, decoding in enumerate(members):
        criterion = decoding.stop_checker.stop_strings
        if criterion is not None and isinstance(chosen[i], int):
            groups.setdefault((criterion.stop_strings, id(criterion.embedding_vec)), []).append(i)
    found: dict[int, bool] = {}
    for places in groups.values():
        criterion = members[places[0]].stop_checker.stop_strings
        assert criterion is not None
        width = criterion.maximum_token_len
        nothing = len(criterion.embedding_vec) - 1  # stands for a token that matches nothing
        windows: list[list[Any]] = [[*members[i].tail(width - 1), chosen[i]] for i in places]
        padded = [[nothing] * (width - len(window)) + window for window in windows]
        ids = torch.tensor(padded, device=criterion.embedding_vec.device)  # [rows, width]
        found.update(zip(places, hits(criterion, ids, None)))
    return found
