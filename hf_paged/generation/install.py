"""The entry point: `install` replaces methods of transformers so that
`cache_implementation="paged"` works in `generate`; `uninstall` restores them."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.utils import GenerationMixin

from .. import compat, forks, rooms
from ..after_import import after_import, forget_import
from ..attention import interface
from ..attention.switch import NAME
from ..batching.arguments import (
    as_list,
    check_assistant,
    check_ids,
    check_numbers,
    check_streamed_rows,
    check_streamer,
    check_weights,
)
from ..batching.decoding.prepare import LoopCall, capturing
from ..batching.decoding.sample import ObservedCriteria, RowStreamers
from ..batching.factory import batch_invariant_error
from ..cache.paged_cache import PagedCache
from ..config import INSTALL_VARIABLE, PagedConfig, shown
from ..interrupts import guarded
from ..model.own_loop import cache_parts
from ..model.registry import check_options, warn_once
from ..model.sharding import deferring_signals
from ..model.values import is_user_module
from ..switches import NOTHING
from ..threads import step_lock
from ..topics import Topic
from .batch_call import batch_of
from .call import Call, caches_in, current_call, prepared_call, starting_calls
from .invocation import Invocation, Method, method_of, wrapper_of

PAGED_IMPLEMENTATIONS = ("paged", NAME)  # values of `cache_implementation` for a paged cache
_PEFT = "peft.peft_model"
_OLD_CACHE_NAME = "past_key_values"  # the cache argument before transformers 5.24

_lock = forks.lock()
_is_paged_by_default = False  # whether calls without `cache_implementation` use one


# Replacements of `GenerationMixin` methods


def _generate(generate: Invocation) -> Any:
    generate.name_arguments()
    implementation = generate.option("cache_implementation")
    if implementation in PAGED_IMPLEMENTATIONS:
        return _generate_paged(generate)
    if isinstance(implementation, str):
        close_matches = difflib.get_close_matches(
            implementation.lower(), PAGED_IMPLEMENTATIONS, n=1
        )
        if close_matches:
            raise ValueError(
                f"`cache_implementation` is {implementation!r}: did you mean {close_matches[0]!r}?"
            )
    elif (
        implementation is None
        and not _is_paged_by_default
        and generate.option("cache_config") is not None
        and not generate.option("is_assistant")
        and not _is_paged_cache_passed(generate)
    ):
        warn_once(
            generate.model,
            Topic.NOT_PAGED(
                "got a `cache_config` without a `cache_implementation`, so transformers' own"
                " cache is used and the config has no effect: add"
                ' cache_implementation="paged", or leave `cache_config` out'
            ),
        )
    if not _is_paged_by_default:
        return _run(generate, False)
    _split_streamer(generate)
    return _run_untraced(generate, False)


def _is_paged_cache_passed(generate: Invocation) -> bool:
    values = [*caches_in(generate.kwargs), generate.kwargs.get(_OLD_CACHE_NAME)]
    parts = [part for value in values for part in cache_parts(value)]
    return any(isinstance(part, PagedCache) for part in parts)


@torch.compiler.disable  # for compiled functions that call `generate`
def _generate_paged(generate: Invocation) -> Any:
    _check_arguments(generate)
    kwargs = generate.kwargs
    cache_config = PagedConfig.coerce(generate.option("cache_config"))
    if kwargs.get("cache_config") is not None:
        kwargs["cache_config"] = cache_config.to_dict()
    if kwargs.get("cache_implementation") == "paged":
        # transformers would serve "paged" with its continuous batching, before any preparation
        kwargs["cache_implementation"] = NAME
    _split_streamer(generate)
    return _run(generate, True)


def _split_streamer(generate: Invocation) -> None:
    """Replaces a list of streamers, one per row, by a streamer for all rows."""
    streamer = generate.kwargs.get("streamer")
    if isinstance(streamer, (list, tuple)):
        has_encoder = generate.model.config.is_encoder_decoder
        mask = "decoder_attention_mask" if has_encoder else "attention_mask"
        generate.kwargs["streamer"] = RowStreamers(streamer, generate.kwargs.get(mask))


@guarded
def _run(generate: Invocation, is_requested: bool) -> Any:
    prepared_call.set(None)
    _wrap_overrides(type(generate.model))
    outer_call = generate.value_of(current_call)
    call = Call(generate.model, callable(generate.kwargs.get("custom_generate")))
    if is_requested:
        reason = f"{type(generate.model).__name__} prepares its cache itself"
        call.note_missing_cache(reason, "Use a model that generates as transformers does")
        if outer_call is not None:
            outer_call.is_delegated = True
    with call.running():
        return generate.run()


_run_untraced = torch.compiler.disable(_run)


def _check_arguments(generate: Invocation) -> None:
    """Raises `ValueError` or `TypeError` for arguments that would otherwise fail after memory has
    been allocated, or with an error that does not name them."""
    kwargs = generate.kwargs
    config = generate.generation_config
    check_weights(generate.model)
    misplaced_names = kwargs.keys() & PagedConfig.__annotations__.keys()
    if misplaced_names:
        pairs = [f'"{name}": {shown(kwargs[name])}' for name in sorted(misplaced_names)]
        options_text = ", ".join(pairs)
        raise TypeError(
            "the paged cache takes these options in its config: pass"
            f" cache_config={{{options_text}}}"
        )
    ids = _checked_ids(generate)
    for name in (_OLD_CACHE_NAME, *compat.CACHE_NAMES):
        cache = kwargs.get(name)
        if isinstance(cache, (str, Mapping, PagedConfig)):
            raise ValueError(
                f"`{name}` is {shown(cache)}: pass a cache, such as `PagedCache(model.config)`;"
                " options go into `cache_config`"
            )
    check_assistant(kwargs.get("assistant_model"))
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(
            f"`generation_config` is {shown(config)}: pass a `GenerationConfig`, or the options as"
            " keyword arguments"
        )
    options = {} if config is None else vars(config)
    check_numbers({**options, **kwargs}, check_range=False)
    for name in ("logits_processor", "stopping_criteria"):
        as_list(name, kwargs.get(name))
    streamer = kwargs.get("streamer")
    streamers = streamer if isinstance(streamer, (list, tuple)) else [streamer]
    for row_streamer in streamers:
        check_streamer(row_streamer)
    if streamer is not None and isinstance(ids, torch.Tensor):
        repeats = generate.option("num_return_sequences") or 1
        check_streamed_rows(streamer, len(ids) * repeats, "pass a list of streamers, one per row")


def _checked_ids(generate: Invocation) -> Any:
    """Returns the argument that holds the prompts' token ids; `None` if there is none. Raises
    `ValueError` if it is a mapping or, for a model without an encoder whose main input is token
    ids, if the ids are invalid."""
    model = generate.model
    kwargs = generate.kwargs
    positional = generate.args[0] if generate.args else None
    ids = kwargs.get("input_ids", kwargs.get("inputs", positional))
    if isinstance(ids, Mapping):
        raise ValueError(
            "`inputs` is a mapping, as tokenizers return it: unpack it, `model.generate(**inputs,"
            " ...)`"
        )
    main_input = getattr(model, "main_input_name", None)
    if main_input == "input_ids" and not model.config.is_encoder_decoder:
        has_other_inputs = any(
            kwargs.get(name) is not None for name in ("inputs_embeds", _OLD_CACHE_NAME)
        )
        is_whole_prompt = not has_other_inputs and not caches_in(kwargs)
        mask = kwargs.get("attention_mask") if is_whole_prompt else None
        check_ids(ids, mask, is_whole_prompt)
    return ids


def _prepare_cache(prepare: Invocation) -> Any:
    if prepare.value_of(capturing) is not None:
        return None  # the captured loop does not run, so it needs no cache
    model = prepare.model
    arguments = prepare.bound.arguments
    generation_config = arguments["generation_config"]
    model_kwargs = arguments["model_kwargs"]
    call = prepare.value_of(current_call)
    is_bypassed = call is None  # by the model's own `generate`
    is_passed = bool(caches_in(model_kwargs))
    uses_default = (
        _is_paged_by_default and not is_passed and generation_config.use_cache is not False
    )
    implementation = generation_config.cache_implementation
    config = None
    if implementation in PAGED_IMPLEMENTATIONS or (implementation is None and uses_default):
        config = PagedConfig.coerce(generation_config.cache_config)
        # `None`, since an assistant's config copies this value, and transformers refuses "dynamic"
        # there
        generation_config.cache_implementation = None
    # early exit in another thread changes the number of layers in the config while it drafts
    with NOTHING if config is None else step_lock(model):
        result = prepare.run()
    with deferring_signals(model):
        if call is None:
            own_generate = getattr(model, "generate", None)
            module_name = getattr(own_generate, "__module__", "transformers")
            call = Call(model, has_custom_loop=is_user_module(module_name))
            # the model's own `generate` may have passed the model's config instead of a copy
            generation_config.cache_implementation = implementation
            prepared_call.set(call)
        call.has_prepared_cache = True
        if config is not None and not is_passed:
            call.page_caches(config, arguments)
        parts = [part for cache in caches_in(model_kwargs) for part in cache_parts(cache)]
        caches = [part for part in parts if isinstance(part, PagedCache)]
        if caches:
            call.use_caches(caches, generation_config, are_built=not is_passed)
            if is_passed and generation_config.cache_config:
                check_options(model, caches, generation_config.cache_config)
        elif config is not None:
            call.note_missing_cache(*_reason_and_remedy(model, is_passed, arguments))
        if not call.built_caches:
            starting_calls.discard(call)
        if config is not None and config.batch_invariant and not call.built_caches:
            raise batch_invariant_error(model, call.reason)
        if is_bypassed:
            call.release_caches()
    return result


def _reason_and_remedy(model: Any, is_passed: bool, arguments: dict[str, Any]) -> tuple[str, str]:
    """Returns why a call that requested a paged cache has none, and how it could get one."""
    if is_passed:
        return "the caller's own cache is used", "Pass no cache, or a `hf_paged.PagedCache`"
    if arguments["generation_config"].use_cache is False:
        return "use_cache is False", "Leave `use_cache=False` out"
    if caches_in(arguments["model_kwargs"]) or not compat.supports_dynamic_cache(model):
        return "the model has a cache of its own", "Use a model whose cache is a `DynamicCache`"
    return (
        f"transformers {transformers.__version__} made no cache that hf_paged recognizes",
        "Install a version of transformers that this hf_paged supports",
    )


def _expand_inputs(expand: Invocation) -> Any:
    call = expand.value_of(current_call)
    if call is None:
        return expand.run()
    call.note_inputs(**expand.kwargs)
    result = expand.run()
    if compat.ENCODE_MEDIA is None and not expand.model.config.is_encoder_decoder:
        _, expanded_inputs = result
        call.has_misassigned_images |= _has_misassigned_images(expand.kwargs, expanded_inputs)
    return result


def _has_misassigned_images(inputs: dict[str, Any], expanded_inputs: dict[str, Any]) -> bool:
    """Whether the expansion repeated images one by one although rows have several images, as
    transformers 5.17 does: `[A, A, B, B]` for two rows that each have the images `[A, B]`."""
    repeats = inputs.get("expand_size", 1)
    input_ids = inputs.get("input_ids")
    if repeats == 1 or not isinstance(input_ids, torch.Tensor):
        return False
    for name, value in inputs.items():
        expanded_value = expanded_inputs.get(name)
        are_tensors = isinstance(value, torch.Tensor) and isinstance(expanded_value, torch.Tensor)
        if are_tensors and value.dim() and len(value) != len(input_ids):
            one_by_one = value.repeat_interleave(repeats, dim=0)
            if torch.equal(expanded_value, one_by_one):
                return True
    return False


def _loop_call(decode: Invocation, call: Call | None) -> LoopCall:
    unexpanded = None if call is None else call.unexpanded
    return LoopCall(decode.original.__name__, decode.bound.arguments, unexpanded)


@guarded
def _decode(decode: Invocation) -> Any:
    call = decode.value_of(current_call)
    capture = decode.value_of(capturing)
    if capture is not None:
        return capture.add(_loop_call(decode, call))
    bypassing_call = decode.value_of(prepared_call)
    running_call = NOTHING
    if bypassing_call is not None:
        prepared_call.set(None)
        call = bypassing_call
        running_call = call.running()
    with running_call:
        if call is not None and call.built_caches:
            loop_call = _loop_call(decode, call)
            with deferring_signals(decode.model):
                batch = batch_of(call, loop_call)
                if batch:
                    return batch.run()
            call.claim_blocks(loop_call.arguments)
        starting_calls.discard(call)
        streamer = decode.kwargs.get("streamer")
        if isinstance(streamer, RowStreamers):
            criteria = decode.kwargs["stopping_criteria"]
            decode.kwargs["stopping_criteria"] = ObservedCriteria(criteria, streamer)
        return decode.run()


def _prefill(prefill: Invocation) -> Any:
    call = prefill.value_of(current_call)
    sharing = rooms.room_if_installed("shared_prefill")
    if call is None or sharing is None:
        return prefill.run()
    return sharing.share_prefill(prefill, call)


def _encode_media(encode: Invocation) -> Any:
    if encode.value_of(capturing) is None or encode.model.config.is_encoder_decoder:
        return encode.run()
    return encode.bound.arguments["model_kwargs"]


def _warn_of_padding(warn: Invocation) -> Any:
    """Skips transformers' padding check in paged forwards, since it would wait for the device. Such
    forwards have a mask or no padding."""
    if compat.attention_of(warn.model.config) == NAME:
        return None
    return warn.run()


_REPLACEMENTS: dict[str, Callable[[Invocation], Any]] = {
    "generate": _generate,
    **({} if compat.ENCODE_MEDIA is None else {compat.ENCODE_MEDIA: _encode_media}),
    compat.EXPAND_INPUTS: _expand_inputs,
    compat.PREPARE_CACHE: _prepare_cache,
    compat.PREFILL: _prefill,
    compat.SAMPLE: _decode,
    compat.BEAM_SEARCH: _decode,
    compat.ASSISTED_DECODING: _decode,
    compat.WARN_OF_PADDING: _warn_of_padding,
}
_installed: dict[tuple[type, str], tuple[Method | None, Method]] = {}
"""By class and name of each replaced method: the class's own method, if it had one, and the
wrapper."""


def _replace(owner: type, name: str, wrapper: Method | None = None) -> None:
    """Replaces a method with `wrapper`, by default a new wrapper that calls the function of this
    name in `_REPLACEMENTS`. Does nothing if the method is already replaced. Called with
    `_lock` held."""
    if (owner, name) not in _installed:
        if wrapper is None:
            wrapper = wrapper_of(method_of(owner, name), _REPLACEMENTS[name])
        _installed[owner, name] = (vars(owner).get(name), wrapper)
        setattr(owner, name, wrapper)


def _native() -> rooms.NativeRoom:
    return rooms.room("native", "`continuous_batching`")


def _add_to_peft(module: Any) -> None:
    """Replaces methods of `PeftModel` (`module` is `peft.peft_model`) with those of the optional
    package `adapters`. If `install` has replaced the methods of continuous batching, also adds
    the methods that call the wrapped model's methods of continuous batching."""
    adapters: rooms.AdaptersRoom | None = rooms.room_if_installed("adapters")
    methods = {} if adapters is None else adapters.wrapper_methods(module.PeftModel)
    with _lock:
        if any(owner is ContinuousMixin for owner, _ in _installed):
            methods = {**methods, **_native().wrapper_methods}
        for name, method in methods.items():
            _replace(module.PeftModel, name, method)


def _wrap_overrides(model_class: type) -> None:
    """Wraps the input expansion of a class that overrides it (Qwen2-VL in transformers 5.17), so
    that a call sees its inputs before they are expanded (`_expand_inputs`)."""
    name = compat.EXPAND_INPUTS
    owner = next(base for base in model_class.__mro__ if name in vars(base))
    if (owner, name) not in _installed:
        with _lock:
            if _installed:
                _replace(owner, name)


def install(
    continuous_batching: bool | PagedConfig | Mapping[str, Any] = False,
    *,
    by_default: bool = False,
) -> None:
    """Makes `cache_implementation="paged"` and `attn_implementation="hf_paged"` work. Idempotent.
    Importing hf_paged calls `install` with the options that the environment variable
    HF_PAGED_INSTALL names; `python -m hf_paged run` sets this variable.

    Args:
        continuous_batching (`bool`, [`PagedConfig`] or `dict`): Also run `generate_batch`,
            `init_continuous_batching` and `continuous_batching_context_manager` of all models on a
            [`PagedEngine`]; a config passed here is their default. A later `install` without this
            option does not undo it.
        by_default (`bool`): Also use a paged cache in calls of `generate` for which neither the
            call nor a configuration names a `cache_implementation`, no cache is passed and
            `use_cache` is not `False`. A later `install` without this option does not undo it.
    """
    global _is_paged_by_default
    native = None if continuous_batching is False else _native()
    with _lock:
        if not _installed:
            interface.register()
            compat.allow_cache_implementation(NAME, True)
            for name in _REPLACEMENTS:
                is_of_model = name == compat.WARN_OF_PADDING
                _replace(PreTrainedModel if is_of_model else GenerationMixin, name)
        _is_paged_by_default |= by_default
        if native is not None:
            config = None if isinstance(continuous_batching, bool) else continuous_batching
            native.set_default(PagedConfig.coerce(config, "continuous_batching"))
            for name, function in native.replacements.items():
                replacement = functools.partial(Invocation.run, function=function)
                wrapper = wrapper_of(method_of(ContinuousMixin, name), replacement)
                _replace(ContinuousMixin, name, wrapper)
    after_import(_PEFT, _add_to_peft)


def install_from_environment() -> None:
    """Runs `install` with the options that HF_PAGED_INSTALL names. Raises `ValueError` for unknown
    names."""
    allowed_names = inspect.signature(install).parameters.keys()
    text = os.environ.get(INSTALL_VARIABLE, "")
    names = [name for name in text.split(",") if name]
    unknown_names = [name for name in names if name not in allowed_names]
    if unknown_names:
        raise ValueError(
            f"{INSTALL_VARIABLE} names {unknown_names}: it must be a comma-separated list of names"
            f" among {', '.join(allowed_names)}"
        )
    install(**dict.fromkeys(names, True))


def uninstall() -> None:
    """Undoes `install` for later calls. Raises `RuntimeError`, and changes nothing, if other code
    has replaced one of the methods since."""
    global _is_paged_by_default
    with _lock:
        for (owner, name), (_, wrapper) in _installed.items():
            if getattr(owner, name) is not wrapper:
                raise RuntimeError(
                    f"`{owner.__name__}.{name}` was replaced after hf_paged was installed: undo"
                    " that first"
                )
        _is_paged_by_default = False
        forget_import(_PEFT, _add_to_peft)
        if any(owner is ContinuousMixin for owner, _ in _installed):
            _native().destroy_kept_managers()
        while _installed:
            (owner, name), (original, _) = _installed.popitem()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        compat.allow_cache_implementation(NAME, False)
        interface.unregister()
        latent: rooms.LatentRoom | None = rooms.room_if_installed("latent")
        if latent is not None:
            latent.unwrap_expansions()
