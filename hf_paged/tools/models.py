"""Inspects a model without its weights: finds its class, its layer groups, the route of a call and
its kernels. The route is taken from a short call with random weights."""

from __future__ import annotations

import copy
import difflib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .. import compat
from ..attention import backends
from ..attention.backends.reference import AttentionCall
from ..attention.switch import foreign_attention, switchable_configs
from ..cache.groups import GroupSpec
from ..cache.kv_blocks import KVBlocks
from ..cache.paged_cache import spec_of
from ..interrupts import is_interrupt
from ..model.registry import Route, last_route
from ..model.trial import first_line
from ..rooms import LatentRoom, room_if_installed
from ..step import StepMetadata

MAX_RUN_BYTES = 4 << 30  # limit on the weights of a model that runs on the CPU to find shapes
MAX_CHECK_BYTES = 2 << 30  # limit on the weights of a model that `find_route` runs
_NUM_TOKENS = 4  # tokens of a short forward
_CHUNK_TOKENS = 64  # tokens of a prefill chunk
# tasks whose classes generate, as in the names of transformers' mappings
_DECODER_TASKS = (
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
)
_ENCODER_DECODER_TASKS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", *_DECODER_TASKS)


def find_model(name: str) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Returns the configuration and the generative class for `name`: a folder with a `config.json`,
    the path of such a file, a model type, a class of transformers, or a Hub model that is already
    cached. Raises `ValueError` for other names, and for models that cannot generate."""
    path = Path(name)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{path} is a folder without a config.json")
        try:
            config = AutoConfig.from_pretrained(str(file), local_files_only=True)
        except (OSError, ValueError) as error:
            if is_interrupt(error):
                raise
            raise ValueError(
                f"transformers {transformers.__version__} cannot read the configuration {file}:"
                f" {first_line(error)}"
            ) from error
        return _find_class(config)
    cls: Any = getattr(transformers, name, None)
    if name in CONFIG_MAPPING:
        cls = CONFIG_MAPPING[name]
    if _is_subclass(cls, PreTrainedConfig) and cls is not PreTrainedConfig:
        return _find_class(cls())
    if _is_subclass(cls, PreTrainedModel) and cls.config_class is not None:
        config = cls.config_class()
        if not cls.can_generate():
            _, generative = _find_class(config)
            raise ValueError(f"{name} does not generate: use {generative.__name__}")
        return config, cls
    try:
        return _find_class(AutoConfig.from_pretrained(name, local_files_only=True))
    except (OSError, ValueError) as error:  # not cached on this machine
        if is_interrupt(error):
            raise
    names = [*CONFIG_MAPPING.keys(), *dir(transformers)]
    similar_names = ", ".join(difflib.get_close_matches(name, names, n=5))
    raise ValueError(
        f"{name!r} is not a path here, nor a cached model of the Hub, nor a model type or a class"
        f" of transformers {transformers.__version__}. Similar names: {similar_names or 'none'}."
        " Pass a folder with a config.json, such a file, a cached model's name, a model type such"
        " as llama, or a class such as Qwen2Config or LlamaForCausalLM. Nothing is downloaded."
    )


def saved_generation_config(name: str) -> GenerationConfig | None:
    """Returns the generation config that is saved with the configuration of `name` (see
    [`find_model`]); `None` if there is none."""
    path = Path(name)
    folder = str(path.parent if path.is_file() else path)
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:  # missing, or not cached on this machine
        if is_interrupt(error):
            raise
        return None


def _find_class(config: PreTrainedConfig) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Returns the configuration and the first class that can generate, first among the
    configuration's `architectures`, then in transformers' mappings. Raises `ValueError` if there is
    none."""
    candidates: list[Any] = [
        getattr(transformers, name, None) for name in config.architectures or ()
    ]
    tasks = _ENCODER_DECODER_TASKS if config.is_encoder_decoder else _DECODER_TASKS
    for task in tasks:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")
        classes = mapping.get(type(config), ())
        if not isinstance(classes, tuple):
            classes = (classes,)
        candidates += classes
    for cls in candidates:
        if _is_subclass(cls, PreTrainedModel) and cls.can_generate():
            return config, cls
    raise ValueError(f"transformers has no class for {type(config).__name__} that generates")


def _is_subclass(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def build_model(
    config: PreTrainedConfig, cls: type[PreTrainedModel], dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """Builds a model in evaluation mode, with random weights that are the same in each call. Raises
    `ValueError` if its configuration is unusable."""
    try:
        with torch.random.fork_rng([]), torch.device(device):
            torch.manual_seed(0)
            config_copy = copy.deepcopy(config)
            model: PreTrainedModel = compat.from_config(cls, config_copy, dtype=dtype)
    except Exception as error:  # inconsistent configurations raise errors of any type
        if is_interrupt(error):
            raise
        raise ValueError(
            f"{cls.__name__} cannot be built from its configuration: {first_line(error)}"
        ) from error
    return model.eval()


def measure_blocks(
    model: PreTrainedModel, block_size: Callable[[GroupSpec], int], kv_dtype: str | None = None
) -> tuple[dict[GroupSpec, list[KVBlocks]], dict[str, int]]:
    """Returns one block of each layer of a model on the meta device, by layer group, with
    `block_size(spec)` tokens and the shapes that a forward caches. Also returns the number of
    layers without K/V blocks, by class. Raises `ValueError` if the forward fails."""
    blocks_by_group: defaultdict[GroupSpec, list[KVBlocks]] = defaultdict(list)
    other_layers: Counter[str] = Counter()
    for kind, cache in _forward_caches(model).items():
        for layer in cache.layers:
            spec = spec_of(layer, kind)
            if spec is None:
                other_layers[type(layer).__name__] += 1
            elif layer.keys is not None:
                keys = layer.keys.to("meta")
                values = layer.values.to("meta")
                size = block_size(spec)
                block = KVBlocks.allocate(1, size, keys, values, kv_dtype=kv_dtype)
                blocks_by_group[spec].append(block)
    return blocks_by_group, dict(other_layers)


def stores_latents(model: PreTrainedModel, blocks: list[KVBlocks]) -> bool:
    """Whether the layers of `blocks` store the latents of multi-head latent attention as keys, and
    the rotary keys as values."""
    latent: LatentRoom | None = room_if_installed("latent")
    if latent is None or not any(map(latent.can_absorb, model.modules())):
        return False
    shapes = [(layer.keys.shape, layer.values.shape) for layer in blocks]
    return all(keys[1] == 1 and keys[3] != values[3] for keys, values in shapes)


def _forward_caches(model: PreTrainedModel) -> dict[str, DynamicCache]:
    """Returns the caches, by kind (`"self"` or `"cross"`), after a forward on the meta device or,
    if that fails and the weights take at most `MAX_RUN_BYTES`, on the CPU with random weights.
    Raises `ValueError` if no forward succeeds."""
    devices = ["meta"]
    if model.get_memory_footprint() <= MAX_RUN_BYTES:
        devices.append("cpu")
    for device in devices:
        try:
            new_model = build_model(model.config, type(model), model.dtype, device)
            return _run_forward(new_model)
        except Exception as error:  # the forward needs values, or the configuration is inconsistent
            if is_interrupt(error):
                raise
            last_error = error
    raise ValueError(
        f"the shapes of {type(model).__name__}'s keys and values are unknown, since its forward"
        f" fails with this configuration: {first_line(last_error)}"
    ) from last_error


def _run_forward(model: PreTrainedModel) -> dict[str, DynamicCache]:
    text_config = model.config.get_text_config(decoder=True)
    # some models search the ids for the padding token, which fails on the meta device
    model.config.pad_token_id = text_config.pad_token_id = None
    caches = {"self": DynamicCache(config=text_config)}
    cache: DynamicCache | EncoderDecoderCache = caches["self"]
    input_ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device=model.device)
    inputs: dict[str, object] = {"input_ids": input_ids}
    if model.config.is_encoder_decoder:
        caches["cross"] = DynamicCache(config=text_config)
        cache = EncoderDecoderCache(*caches.values())
        inputs = {"decoder_input_ids": input_ids, "encoder_outputs": _make_encoder_output(model)}
    # the other implementations count the tokens of each expert, which needs values
    model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        model(**inputs, **{compat.cache_name(model): cache}, use_cache=True)
    return caches


def _make_encoder_output(model: PreTrainedModel) -> BaseModelOutput:
    """Returns an encoder output for a short input, filled with zeros."""
    width = getattr(model.config, "d_model", None) or model.config.hidden_size
    states = torch.zeros(1, _NUM_TOKENS, width, dtype=model.dtype, device=model.device)
    return BaseModelOutput(states)


def find_kernels(
    meta_blocks: KVBlocks, window: int | None, is_latent: bool, device: torch.device
) -> dict[str, str]:
    """Returns the names of the attention backends that `backends.select` chooses on `device` for
    blocks like `meta_blocks`, by step: `"decode"` and `"prefill chunk"`."""
    data = [torch.empty_like(tensor, device=device) for tensor in meta_blocks.data]
    blocks = meta_blocks.like(data)
    block_size = meta_blocks.keys.shape[2]
    if is_latent:  # attention reads the latents, as `ExpandedTensor.absorb` returns them
        blocks = blocks.latents
    tables = torch.zeros(1, 1, dtype=torch.int32, device=device)
    heads_and_dim = blocks.keys.shape[1::2]
    backend_names = {}
    for step_name, num_tokens in (("decode", 1), ("prefill chunk", _CHUNK_TOKENS)):
        step = StepMetadata.rectangle(
            tables, (num_tokens,), block_size, query_len=num_tokens, window=window
        )
        dtype = meta_blocks.dtypes[0]
        query = torch.zeros(num_tokens, *heads_and_dim, dtype=dtype, device=device)
        with torch.no_grad():
            call = AttentionCall(query, blocks, step, scale=1.0)
            selected_backend = backends.select(call)
        backend_names[step_name] = next(
            name for name, backend in backends.BACKENDS.items() if backend is selected_backend
        )
    return backend_names


def find_route(model: PreTrainedModel) -> Route:
    """Returns the route that a short `generate` call takes on the CPU, with random weights, for a
    model on the meta device. If the model is too large or the call fails, tries with fewer layers;
    if that does not help, the route's `road` is `"undecided"`."""
    can_switch = bool(switchable_configs(model.modules()))
    in_place = can_switch and foreign_attention(model.modules()) is None
    reason = (
        "the first call decides after it has compared a few forwards; none ran here, since the"
        " model is large"
    )
    for addition in ("", " and fewer layers"):
        try:
            config = _shrink_config(model.config) if addition else model.config
            meta_model = build_model(config, type(model), torch.float32, "meta")
            if meta_model.get_memory_footprint() > MAX_CHECK_BYTES:
                continue
            cpu_model = build_model(config, type(model), torch.float32, "cpu")
            cpu_model.generation_config.use_cache = model.generation_config.use_cache
            input_ids = torch.ones(1, _NUM_TOKENS, dtype=torch.long)
            inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
            if config.is_encoder_decoder:
                inputs = {"encoder_outputs": _make_encoder_output(cpu_model)}
            GenerationMixin.generate(
                cpu_model,
                **inputs,
                cache_implementation="paged",
                max_new_tokens=3,
                min_new_tokens=3,
                do_sample=False,
            )
            route = last_route(cpu_model)
            if route is not None:
                reason = f"{route.reason} (of a call on random weights{addition})"
                return replace(route, reason=reason)
        except Exception as error:  # some configurations cannot have fewer layers, or need inputs
            if is_interrupt(error):
                raise
            reason = f"a short call fails: {first_line(error)}"
    return Route("undecided", reason, in_place)


def _shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy with the fewest leading layers that include each kind of layer (at least 2, if
    the model has 2), and with smaller sizes where these do not change keys and values."""
    config = copy.deepcopy(config)
    text_config: Any = config.get_text_config(decoder=True)
    for part in vars(config).values():
        is_other_config = isinstance(part, PreTrainedConfig) and part is not text_config
        if is_other_config and hasattr(part, "num_hidden_layers"):
            part.num_hidden_layers = 1
    layers = DynamicCache(config=text_config).layers
    kinds = [(type(layer), spec_of(layer, "self")) for layer in layers]
    former_num_layers = text_config.num_hidden_layers
    num_layers = 1 + max(map(kinds.index, kinds))
    num_layers = min(max(2, num_layers), former_num_layers)
    text_config.num_hidden_layers = num_layers
    max_sizes = {"intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 4096}
    for name, value in vars(text_config).items():
        max_value = max_sizes.get(name)
        if name.endswith("token_id"):
            max_value = max_sizes["vocab_size"] - 1
        if isinstance(value, list) and len(value) == former_num_layers:
            setattr(text_config, name, value[:num_layers])
        elif isinstance(value, int) and max_value is not None:
            setattr(text_config, name, min(value, max_value))
    return config
