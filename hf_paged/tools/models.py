"""From what a user names to a model without weights."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .. import compat
from ..model.self_check import first_line

_DECODERS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
_ENCODER_DECODERS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", *_DECODERS)


def find_model(name: str) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """
    The configuration and the generative class that `name` stands for: a folder with a `config.json`, or such a file; a
    model on the Hub that has been downloaded before; a model type (`"llama"`) or a class of transformers
    (`"Qwen2Config"`, `"LlamaForCausalLM"`) with its default configuration. Raises `ValueError` if it is none of these
    or has no class that generates.
    """
    path = Path(name)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{path} is a folder without a config.json")
        try:
            config = AutoConfig.from_pretrained(str(file), local_files_only=True)
        except (OSError, ValueError) as error:
            why = first_line(error)
            raise ValueError(f"{file} is no configuration that this transformers can read: {why}") from error
        return _with_class(config)
    if name in CONFIG_MAPPING:
        return _with_class(CONFIG_MAPPING[name]())
    found: Any = getattr(transformers, name, None) if name.isidentifier() else None
    if _is_a(found, PreTrainedConfig) and found is not PreTrainedConfig:
        return _with_class(found())
    if _is_a(found, PreTrainedModel) and found.config_class is not None:
        config = found.config_class()
        if not found.can_generate():
            raise ValueError(f"{name} does not generate: use {_with_class(config)[1].__name__}")
        return config, found
    if os.sep in name or "/" in name:
        with contextlib.suppress(OSError, ValueError):
            return _with_class(AutoConfig.from_pretrained(name, local_files_only=True))
    ends = ("Config", "ForCausalLM", "ForConditionalGeneration")
    types = list(CONFIG_MAPPING.keys())  # which are not what it counts
    names = {each.lower(): each for each in [*(each for each in dir(transformers) if each.endswith(ends)), *types]}
    close = [names[each] for each in difflib.get_close_matches(name.lower(), names, n=5)]
    hint = f" Close to it: {', '.join(close)}." if close else ""
    raise ValueError(
        f"{name!r} is no path here, no model type and no class of transformers {transformers.__version__}."
        f"{hint} "
        f"Give a folder with a config.json, such a file, one of {len(types)} model types such as llama or "
        "gemma3_text, or a class such as Qwen2Config or LlamaForCausalLM. Nothing is downloaded."
    )


def _with_class(config: PreTrainedConfig) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    candidates: list[Any] = [getattr(transformers, name, None) for name in config.architectures or ()]
    for kind in _ENCODER_DECODERS if config.is_encoder_decoder else _DECODERS:
        found = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING").get(type(config), ())
        candidates += found if isinstance(found, tuple) else [found]
    for cls in candidates:
        if _is_a(cls, PreTrainedModel) and cls.can_generate():
            return config, cls
    raise ValueError(f"{type(config).__name__}: transformers has no class for it that generates")


def _is_a(found: Any, base: type) -> bool:
    return inspect.isclass(found) and issubclass(found, base)


def build(config: PreTrainedConfig, cls: type[PreTrainedModel], dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model in eval mode; on `"meta"` it takes no memory. Raises `ValueError` if the configuration does not do."""
    try:
        with torch.device(device):
            model: PreTrainedModel = compat.from_config(cls, config, dtype=dtype)
    except Exception as error:  # whatever a configuration's contradictions lead to
        raise ValueError(f"{cls.__name__} cannot be built from its configuration: {first_line(error)}") from error
    return model.eval()
