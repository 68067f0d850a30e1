"""Inspects a model without its weights: its class, its layer groups, the route of a call and the
kernels. The engine's own checks choose the route, in a short call."""

from __future__ import annotations

import contextlib
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
from ..attention.latent import can_absorb
from ..attention.switch import foreign_attention, switchable_configs
from ..cache.groups import GroupSpec
from ..cache.kv_blocks import KVBlocks
from ..cache.stand_ins import spec_of
from ..model.registry import Route, last_route
from ..model.trial import first_line
from ..step import StepMetadata

MAX_RUN_BYTES = 4 << 30  # largest model that runs on the CPU to find shapes
MAX_CHECK_BYTES = 2 << 30  # largest weights of the model that `find_route` runs
_LENGTH, _CHUNK = 4, 64  # tokens of the forward that finds shapes, and of a prefill chunk
_DECODERS = (
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
)
_ENCODER_DECODERS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", *_DECODERS)


def find_model(name: str) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The configuration and the generative class for `name`: a folder with a `config.json`, the
    path of such a file, a Hub model that is already cached, a model type, or a class of
    transformers. Raises `ValueError` for other names."""
    path = Path(name)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{path} is a folder without a config.json")
        try:
            config = AutoConfig.from_pretrained(str(file), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{file} is no configuration that this transformers can read: {first_line(error)}"
            ) from error
        return _with_class(config)
    cls: Any = getattr(transformers, name, None)
    if name in CONFIG_MAPPING:
        cls = CONFIG_MAPPING[name]
    if _is_a(cls, PreTrainedConfig) and cls is not PreTrainedConfig:
        return _with_class(cls())
    if _is_a(cls, PreTrainedModel) and cls.config_class is not None:
        config = cls.config_class()
        if not cls.can_generate():
            _, generative = _with_class(config)
            raise ValueError(f"{name} does not generate: use {generative.__name__}")
        return config, cls
    with contextlib.suppress(OSError, ValueError):  # not cached on this machine
        config = AutoConfig.from_pretrained(name, local_files_only=True)
        return _with_class(config)
    names = [*CONFIG_MAPPING.keys(), *dir(transformers)]
    close = ", ".join(difflib.get_close_matches(name, names, n=5))
    raise ValueError(
        f"{name!r} is no path here, no model type and no class of transformers"
        f" {transformers.__version__}. Close to it: {close or 'nothing'}. Give a folder with a"
        " config.json, such a file, one of the model types such as llama, or a class such as"
        " Qwen2Config or LlamaForCausalLM. Nothing is downloaded."
    )


def saved_generation_config(name: str) -> GenerationConfig | None:
    """The generation config beside the configuration of `name`, as in [`find_model`]; `None` if
    there is none."""
    path = Path(name)
    folder = str(path.parent if path.is_file() else path)
    with contextlib.suppress(OSError, ValueError):  # missing, or not cached on this machine
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return None


def _with_class(config: PreTrainedConfig) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    candidates: list[Any] = [
        getattr(transformers, name, None) for name in config.architectures or ()
    ]
    kinds = _ENCODER_DECODERS if config.is_encoder_decoder else _DECODERS
    for kind in kinds:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING")
        classes = mapping.get(type(config), ())
        if not isinstance(classes, tuple):
            classes = (classes,)
        candidates += classes
    for cls in candidates:
        if _is_a(cls, PreTrainedModel) and cls.can_generate():
            return config, cls
    raise ValueError(f"{type(config).__name__}: transformers has no class for it that generates")


def _is_a(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def build(
    config: PreTrainedConfig, cls: type[PreTrainedModel], dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """Builds the model in eval mode with fixed random weights. Raises `ValueError` if its
    configuration is unusable."""
    try:
        with torch.random.fork_rng([]), torch.device(device):
            torch.manual_seed(0)
            copied = copy.deepcopy(config)
            model: PreTrainedModel = compat.from_config(cls, copied, dtype=dtype)
    except Exception as error:  # inconsistent configurations raise errors of any type
        raise ValueError(
            f"{cls.__name__} cannot be built from its configuration: {first_line(error)}"
        ) from error
    return model.eval()


def measure(
    model: PreTrainedModel, block_size: Callable[[GroupSpec], int], kv_dtype: str | None = None
) -> tuple[dict[GroupSpec, list[KVBlocks]], dict[str, int]]:
    """For each layer group of a model on the meta device, one block of every layer, with
    `block_size(spec)` tokens and the shapes that a forward caches. Also the number of layers
    without K/V blocks, by class. Raises `ValueError` if the forward fails."""
    groups: defaultdict[GroupSpec, list[KVBlocks]] = defaultdict(list)
    others: Counter[str] = Counter()
    for kind, cache in _forward_caches(model).items():
        for layer in cache.layers:
            spec = spec_of(layer, kind)
            if spec is None:
                others[type(layer).__name__] += 1
            elif layer.keys is not None:
                keys = layer.keys.to("meta")
                values = layer.values.to("meta")
                size = block_size(spec)
                block = KVBlocks.allocate(1, size, keys, values, kv_dtype=kv_dtype)
                groups[spec].append(block)
    return groups, dict(others)


def stores_latents(model: PreTrainedModel, blocks: list[KVBlocks]) -> bool:
    """Whether these layers store the latents of multi-head latent attention as keys and the rotary
    keys as values."""
    has_latents = any(
        "expand_kv" in vars(type(module)) and can_absorb(module) for module in model.modules()
    )
    if not has_latents:
        return False
    shapes = [(layer.keys.shape, layer.values.shape) for layer in blocks]
    return all(keys[1] == 1 and keys[3] != values[3] for keys, values in shapes)


def _forward_caches(model: PreTrainedModel) -> dict[str, DynamicCache]:
    """The caches, by kind, after a forward on the meta device or, if the forward needs values,
    after one with random weights on the CPU."""
    devices = ["meta"]
    if model.get_memory_footprint() <= MAX_RUN_BYTES:
        devices.append("cpu")
    for device in devices:
        try:
            new_model = build(model.config, type(model), model.dtype, device)
            return _run(new_model)
        except Exception as error:  # the forward needs values, or the configuration is inconsistent
            failure = error
    raise ValueError(
        f"the shapes of {type(model).__name__}'s keys and values are not known, since its forward"
        f" fails with this configuration: {first_line(failure)}"
    ) from failure


def _run(model: PreTrainedModel) -> dict[str, DynamicCache]:
    text = model.config.get_text_config(decoder=True)
    # some models search the ids for the padding token, which fails on "meta"
    model.config.pad_token_id = text.pad_token_id = None
    caches = {"self": DynamicCache(config=text)}
    cache: DynamicCache | EncoderDecoderCache = caches["self"]
    ids = torch.zeros(1, _LENGTH, dtype=torch.long, device=model.device)
    inputs: dict[str, object] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        caches["cross"] = DynamicCache(config=text)
        cache = EncoderDecoderCache(*caches.values())
        inputs = {"decoder_input_ids": ids, "encoder_outputs": _encoded(model)}
    model.set_experts_implementation("batched_mm")  # need not count the tokens of an expert
    with torch.no_grad():
        model(**inputs, **{compat.cache_name(model): cache}, use_cache=True)
    return caches


def _encoded(model: PreTrainedModel) -> BaseModelOutput:
    """An encoder output for a short input, filled with zeros."""
    width = getattr(model.config, "d_model", None) or model.config.hidden_size
    states = torch.zeros(1, _LENGTH, width, dtype=model.dtype, device=model.device)
    return BaseModelOutput(states)


def kernels(
    first: KVBlocks, window: int | None, is_latent: bool, device: torch.device
) -> dict[str, str]:
    """The backends that `backends.select` chooses on `device` for blocks like `first`, by kind of
    step."""
    data = [torch.empty_like(part, device=device) for part in first.data]
    blocks = first.like(data)
    block_size = first.keys.shape[2]
    if is_latent:  # as `LatentTensor.absorb` returns them
        blocks = blocks.latents
    tables = torch.zeros(1, 1, dtype=torch.int32, device=device)
    heads_and_width = blocks.keys.shape[1::2]
    names = {}
    for step_name, length in (("decode", 1), ("prefill chunk", _CHUNK)):
        step = StepMetadata.rectangle(
            tables, (length,), block_size, query_len=length, window=window
        )
        query = torch.zeros(length, *heads_and_width, dtype=first.dtypes[0], device=device)
        with torch.no_grad():
            call = AttentionCall(query, blocks, step, scale=1.0)
            chosen = backends.select(call)
        names[step_name] = next(
            name for name, backend in backends.BACKENDS.items() if backend is chosen
        )
    return names


def find_route(model: PreTrainedModel) -> Route:
    """The route of a model on the meta device, from a short `generate` call on the CPU with random
    weights and, if necessary, fewer layers. Its `road` is `"undecided"` if the model is still too
    large or the call fails."""
    can_switch = bool(switchable_configs(model.modules()))
    in_place = can_switch and foreign_attention(model.modules()) is None
    reason = (
        "the first call compares a few forwards and decides, which was not done here: the model is"
        " large"
    )
    for cut in ("", " and fewer layers"):
        try:
            config = _cut(model.config) if cut else model.config
            empty = build(config, type(model), torch.float32, "meta")
            if empty.get_memory_footprint() > MAX_CHECK_BYTES:
                continue
            small = build(config, type(model), torch.float32, "cpu")
            small.generation_config.use_cache = model.generation_config.use_cache
            ids = torch.ones(1, _LENGTH, dtype=torch.long)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if config.is_encoder_decoder:
                inputs = {"encoder_outputs": _encoded(small)}
            GenerationMixin.generate(
                small,
                **inputs,
                cache_implementation="paged",
                max_new_tokens=3,
                min_new_tokens=3,
                do_sample=False,
            )
            route = last_route(small)
            if route is not None:
                reason = f"{route.reason} (of a call on random weights{cut})"
                return replace(route, reason=reason)
        except Exception as error:  # some configurations cannot be cut, or need other inputs
            reason = f"a short call fails: {first_line(error)}"
    return Route("undecided", reason, in_place)


def _cut(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with the fewest layers that include each kind, and with smaller sizes where these do
    not change keys and values."""
    config = copy.deepcopy(config)
    text: Any = config.get_text_config(decoder=True)
    for part in vars(config).values():
        is_other = isinstance(part, PreTrainedConfig) and part is not text
        if is_other and hasattr(part, "num_hidden_layers"):
            part.num_hidden_layers = 1
    layers = DynamicCache(config=text).layers
    kinds = [(type(layer), spec_of(layer, "self")) for layer in layers]
    num_layers = text.num_hidden_layers
    count = 1 + max(map(kinds.index, kinds))
    count = min(max(2, count), num_layers)
    text.num_hidden_layers = count
    limits = {"intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 4096}
    for name, value in vars(text).items():
        limit = limits["vocab_size"] - 1 if name.endswith("token_id") else limits.get(name)
        if isinstance(value, list) and len(value) == num_layers:
            setattr(text, name, value[:count])
        elif isinstance(value, int) and limit is not None:
            setattr(text, name, min(value, limit))
    return config
