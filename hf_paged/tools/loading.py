"""Loads a model and its tokenizer through transformers, from a name or a folder. Imports
transformers on the first load, since commands start without it."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..topics import Topic

logger = logging.getLogger(__name__)

# options that locate files or code, which the `from_pretrained` of the Auto classes take
_SOURCE_OPTIONS = {
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
}


def load_model(name_or_path: str | os.PathLike[str], **options: Any) -> Any:
    """Loads a model of the class that its config names, or a causal language model if the config
    names no class of transformers. If the folder holds a PEFT adapter, loads the base model with
    the adapter. `options` (`dtype`, `device_map`, ...) and errors are as in `from_pretrained`."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.peft import maybe_load_adapters

    from ..interrupts import is_interrupt

    source_options = _source_options(options)
    try:
        _, base, _ = maybe_load_adapters(name_or_path, source_options)
        architectures = AutoConfig.from_pretrained(base, **source_options).architectures
    except (OSError, ValueError) as error:  # if there is no model, `from_pretrained` raises below
        if is_interrupt(error):
            raise
        architectures = None
    name = (architectures or [""])[0]
    model_class = getattr(transformers, name, AutoModelForCausalLM)
    if model_class is not AutoModelForCausalLM:
        options.pop("code_revision", None)  # only Auto classes take it
    return model_class.from_pretrained(name_or_path, **options)


def _source_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _SOURCE_OPTIONS if name in options}


def load_tokenizer(name_or_path: str | os.PathLike[str], model: Any, **options: Any) -> Any:
    """Loads the tokenizer of the model or, for an adapter without one, of its base model. Returns
    `None`, with a warning, if there is none."""
    from transformers import AutoTokenizer

    from ..interrupts import is_interrupt

    source_options = _source_options(options)
    error: Exception | None = None
    for name in dict.fromkeys((str(name_or_path), model.name_or_path)):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **source_options)
        except (OSError, ValueError) as failure:
            if is_interrupt(failure):
                raise
            error = error or failure
        else:
            # without files, transformers makes a useless tokenizer: it has only the special tokens
            # of its class and, for T5, the marker of spaces
            if len(tokenizer) > len(tokenizer.added_tokens_decoder) + 1:
                return tokenizer
    message = (
        "no tokenizer was found, so prompts and results are token ids: pass `tokenizer=` for text"
        " (%s)"
    )
    logger.warning(Topic.TOKENIZER(message), error or "no files")
    return None
