"""The private names of transformers that hf_paged uses; no other module uses them. The import fails
if a required one is missing. Functions that call a method of a model take the model as their first
argument."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel, modeling_layers
from transformers.generation import configuration_utils
from transformers.generation import utils as generation_utils
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .topics import Topic

logger = logging.getLogger(__name__)

_missing: list[str] = []


def _require(name: str, owner: Any = GenerationMixin) -> str:
    """Returns `name`. If `owner` lacks this attribute, the import of this module fails."""
    if not hasattr(owner, name):
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        _missing.append(f"{owner_name}.{name}")
    return name


def _require_method(name: str, owner: type = GenerationMixin) -> Callable[..., Any]:
    """Returns a function that calls the method `name` of its first argument. Checks the name as
    `_require` does."""
    _require(name, owner)

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(model, name)(*args, **kwargs)

    return call


MEDIA = "mm_encoder_outputs"  # the model input with the outputs of vision towers
# The method that runs vision towers before the first forward. `ENCODE_MEDIA` is `None` in older
# versions, where the forward runs them.
_ENCODE_MEDIA_NAME = "_prepare_multimodal_encoder_kwargs_for_generation"
ENCODE_MEDIA = _ENCODE_MEDIA_NAME if hasattr(GenerationMixin, _ENCODE_MEDIA_NAME) else None


def encode_media(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs of a decoder-only model's first forward. If `generate` runs the vision
    tower before that forward, the inputs include the tower's outputs."""
    inputs = dict(inputs)
    if ENCODE_MEDIA is None or not model._supports_mm_encoder_outputs():
        return inputs
    modalities = getattr(model, "input_modalities", ())
    if not any(name in modalities for name in ("image", "video")):
        return inputs
    inputs[MEDIA] = dict(inputs.get(MEDIA) or {})
    return dict(getattr(model, ENCODE_MEDIA)(inputs))


PREPARE_CACHE = _require("_prepare_cache_for_generation")
EXPAND_INPUTS = _require("_expand_inputs_for_generation")
PREFILL = _require("_prefill")
SAMPLE = _require("_sample")
BEAM_SEARCH = _require("_beam_search")
ASSISTED_DECODING = _require("_assisted_decoding")
UPDATE_INPUTS = "_update_model_kwargs_for_generation"

WARN_OF_PADDING = _require("warn_if_padding_and_no_attention_mask", PreTrainedModel)

PREPARE_CONFIG = "_prepare_generation_config"
prepare_generation_config = _require_method(PREPARE_CONFIG)
prepare_special_tokens = _require_method("_prepare_special_tokens")
prepare_generated_length = _require_method("_prepare_generated_length")
_validate_generation_mode = _require_method("_validate_generation_mode")
validate_generated_length = _require_method("_validate_generated_length")
get_logits_processor = _require_method("_get_logits_processor")
get_stopping_criteria = _require_method("_get_stopping_criteria")
optimizing_for_decode = _require_method("_optimize_model_for_decode")
can_compile = _require_method("_valid_auto_compile_criteria")
_STATEFUL = _require("_is_stateful", PreTrainedModel)


def validate_generation_mode(model: Any, mode: Any, config: Any, kwargs: dict[str, Any]) -> None:
    """Validates as transformers does, but allows assisted generation for stateful models, since the
    engine restores their states."""
    if getattr(model, _STATEFUL):
        model = copy.copy(model)
        setattr(model, _STATEFUL, False)
    _validate_generation_mode(model, mode, config, kwargs)


# methods that prepare and update the inputs of forwards
update_inputs = _require_method(UPDATE_INPUTS)
prepare_position_ids = _require_method("_prepare_position_ids_for_generation")
supports_logits_to_keep = _require_method("_supports_logits_to_keep")
supports_dynamic_cache = _require_method("_supports_default_dynamic_cache")
# methods that both beam searches, the engine's and transformers', call on the model
BEAM_METHODS = (
    "_get_top_k_continuations",
    "_get_running_beams_for_next_iteration",
    "_update_finished_beams",
    "_check_early_stop_heuristic",
    "_beam_search_has_unfinished_sequences",
)
(
    _top_k_continuations,
    running_beams,
    update_finished_beams,
    check_early_stop,
    beams_are_unfinished,
) = map(_require_method, BEAM_METHODS)


def _replaced_methods(*loops: str) -> tuple[str, ...]:
    """Returns the names of the private methods that these loops of transformers call on the model
    and the engine's loops do not. Omits `UPDATE_INPUTS`, which some layouts of the engine call."""
    codes = []
    for loop in loops:
        function = getattr(GenerationMixin, loop, lambda: None)
        codes.append(inspect.unwrap(function).__code__)
    for code in codes:  # the list grows by the code of functions and comprehensions in `code`
        codes += filter(inspect.iscode, code.co_consts)
    names = {name: code for code in codes for name in code.co_names if re.match("_[a-z]", name)}
    for name in (*BEAM_METHODS, UPDATE_INPUTS):
        names.pop(name, None)
    # methods of `GenerationMixin`; and methods that only some models have: the loops pass their
    # names to `hasattr`, so these are also constants of the code
    return tuple(
        name
        for name, code in names.items()
        if hasattr(GenerationMixin, name) or name in code.co_consts
    )


REPLACED_METHODS = {
    loop: _replaced_methods(loop, PREFILL) for loop in (SAMPLE, BEAM_SEARCH, ASSISTED_DECODING)
}
"""By decoding loop: the names of the methods that transformers' loop calls on the model and the
engine's loop does not."""


_top_k_parameters = inspect.signature(
    getattr(GenerationMixin, "_get_top_k_continuations", lambda: None)
).parameters


def top_k_continuations(model: Any, log_probs: Any, **arguments: Any) -> tuple[Any, Any, Any]:
    """Returns the best continuations of running beams, or sampled ones: their scores, sequences and
    beam indices, by prompt. `log_probs` `(prompts, beams * vocab_size)` include the scores of the
    beams."""
    if "vocab_size" in _top_k_parameters:  # up to transformers 5.17
        arguments["vocab_size"] = log_probs.shape[-1] // arguments["num_beams"]
    return _top_k_continuations(model, accumulated_log_probs=log_probs, **arguments)


# called with `StopStringCriteria` and a tokenizer: returns `None` if the criterion compares the
# tokenizer's tokens as text; if it compares bytes, returns the kind of the tokenizer's decoder
_stop_mode = _require_method("_get_stop_string_matching_mode", StopStringCriteria)


def stop_texts(tokenizer: Any, strings: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns stop strings as `StopStringCriteria` compares them: as bytes, or as text."""
    if _stop_mode(StopStringCriteria, tokenizer) is None:
        return strings
    return tuple(string.encode() for string in strings)


class _OneTokenTokenizer:
    """A tokenizer whose vocabulary is a single token."""

    def __init__(self, tokenizer: Any, vocabulary: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self.get_vocab = lambda: vocabulary

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def token_text(tokenizer: Any, name: str, token: int) -> Any:
    """Returns the text of a token, whose name in the vocabulary is `name`: bytes or a string, like
    the results of `stop_texts`."""
    one_token_tokenizer = _OneTokenTokenizer(tokenizer, {name: token})
    (text,), _ = StopStringCriteria.clean_tokenizer_vocab(
        one_token_tokenizer, stop_string_matching_mode=_stop_mode(StopStringCriteria, tokenizer)
    )
    return text


candidate_generator = _require_method("_get_candidate_generator")
# the class names by which `generate` also recognizes assistants that read the target's cache
TARGET_CACHE_ASSISTANTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")


# The class of a model's multi-token prediction heads; `None` in older versions, which lack it.
MtpModel: Any = getattr(modeling_layers, "MtpModel", None)
_HEAD = "_project_to_logits"
HAS_MTP = hasattr(MtpModel, "forward_layer") and hasattr(MtpModel, _HEAD)


def mtp_logits(mtp: Any, hidden: Any) -> Any:
    return getattr(mtp, _HEAD)(hidden)


# The names of the arguments with which transformers passes a cache to forwards: "cache" from 5.24
# on, "past_key_values" before that, and names that special or older models use.
_require("ALL_CACHE_NAMES", generation_utils)
CACHE_NAMES: tuple[str, ...] = tuple(
    getattr(generation_utils, "ALL_CACHE_NAMES", ("past_key_values",))
)
_prepare_parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
_current_names = [name for name in CACHE_NAMES if name in _prepare_parameters]
# the name that the installed version uses, also for the cache in `generate`'s outputs
OUTPUT_CACHE = (_current_names or CACHE_NAMES)[0]
if not _current_names:
    logger.warning(
        Topic.VERSIONS(
            "`prepare_inputs_for_generation` of transformers %s has none of the arguments by which"
            " hf_paged recognizes a cache (%s), so no cache is paged: install a version from 5.17"
            " to 5.24, or a newer hf_paged; or import hf_paged before code that replaces this"
            " method"
        ),
        transformers.__version__,
        ", ".join(CACHE_NAMES),
    )


def cache_name(model: Any) -> str:
    """Returns the name of the model's forward argument for the cache: the one in the forward's
    signature or, if there is none, the installed version's."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), OUTPUT_CACHE)


# inputs that only the first forward gets if there is a cache
_require("MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", generation_utils)
PREFILL_INPUTS = frozenset(
    getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
)


def special_token(config: Any, name: str) -> Any:
    """Returns the tensor of `"pad"` or `"eos"` ids that `prepare_special_tokens` set on a config,
    or `None`."""
    return getattr(config, f"_{name}_token_tensor")


_prepare_code = getattr(getattr(GenerationMixin, "_prepare_special_tokens", None), "__code__", None)
for _attribute in ("_pad_token_tensor", "_eos_token_tensor"):
    # attributes that `_prepare_special_tokens` sets
    if _prepare_code is not None and _attribute not in _prepare_code.co_names:
        _missing.append(f"GenerationConfig.{_attribute}")

_IMPLEMENTATION = _require("_attn_implementation_internal", PreTrainedConfig())
SUPPORTS_SDPA = _require("_supports_sdpa", PreTrainedModel)
_CACHE_IMPLEMENTATIONS = _require("ALL_CACHE_IMPLEMENTATIONS", configuration_utils)
_MAPPING = _require("_global_mapping", ALL_ATTENTION_FUNCTIONS)
_require(_MAPPING, ALL_MASK_ATTENTION_FUNCTIONS)

# attribute of a model: the continuous batching manager for the next session
CACHED_MANAGER = "_cached_continuous_batching_manager"
# attribute of `CBGenerateManager` (`transformers serve`): the continuous batching manager
SERVED_MANAGER = "_cb"

from_config = _require_method("_from_config", PreTrainedModel)


def attribute(module: Any, name: str) -> Any:
    """Returns an attribute of a module or its class; `None` if it is missing, or is a parameter,
    buffer or submodule. For a missing attribute, this is much faster than `getattr`, which makes
    `nn.Module.__getattr__` raise an error."""
    attributes = vars(module)
    if name in attributes:
        return attributes[name]
    if hasattr(type(module), name):
        return getattr(module, name, None)
    return None


def attention_of(config: PreTrainedConfig) -> Any:
    """Returns the name of the attention implementation that models with `config` look up."""
    return object.__getattribute__(config, _IMPLEMENTATION)


def set_attention(config: PreTrainedConfig, implementation: Any) -> None:
    """Sets the attention implementation, unchecked, on this config but not on its sub-configs."""
    object.__setattr__(config, _IMPLEMENTATION, implementation)


def mask_function(implementation: str) -> Callable[..., Any] | None:
    """Returns the mask function that transformers uses for an attention implementation; `None`
    unless one is registered (`AttentionMaskInterface.register`)."""
    functions = ALL_MASK_ATTENTION_FUNCTIONS
    if implementation not in getattr(functions, _MAPPING):
        return None
    return functions[implementation]


def forget_attention(implementation: str) -> None:
    """Undoes `AttentionInterface.register` and `AttentionMaskInterface.register`."""
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        getattr(functions, _MAPPING).pop(implementation, None)


def allow_cache_implementation(name: str, is_allowed: bool) -> None:
    """Sets whether `GenerationConfig` accepts the cache implementation `name`."""
    names = getattr(configuration_utils, _CACHE_IMPLEMENTATIONS)
    allowed = tuple(value for value in names if value != name)
    if is_allowed:
        allowed = (*allowed, name)
    setattr(configuration_utils, _CACHE_IMPLEMENTATIONS, allowed)


def is_pipeline(model: Any) -> bool:
    """Whether this process has only some of the model's layers (pipeline parallelism of
    `from_pretrained`)."""
    return getattr(model, "_pp_stage", None) is not None


def shard_ranks(model: Any) -> list[int] | None:
    """Returns the global ranks, in order, of the processes among which `from_pretrained` has split
    the model by tensor or pipeline parallelism, without data-parallel replicas; `None` if one
    process holds the whole model."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ()
    if "fsdp" in names and mesh["fsdp"].size() > 1:
        mesh = mesh["tp"]
    members = mesh.mesh.flatten().tolist()
    return members if len(members) > 1 else None


def layer_configs(config: Any) -> Sequence[Any]:
    """Returns the config of each layer if the layers' configs differ: values that differ cannot be
    read from the model's config, which raises an error. Otherwise, returns `[config]`."""
    if not getattr(config, "is_heterogeneous", False):
        return [config]
    return config.per_layer_config


if _missing:
    raise ImportError(
        Topic.VERSIONS(
            f"transformers {transformers.__version__} has no {', '.join(_missing)}, which hf_paged"
            " uses: install a version from 5.17 on and below 6 that has them, or a newer hf_paged"
        )
    )
