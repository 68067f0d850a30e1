"""Loads a model and its tokenizer through transformers, from a name or a folder."""

from __future__ import annotations

import logging
import os
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..topics import Topic

logger = logging.getLogger(__name__)

# options of `from_pretrained` that say where files are; configs and tokenizers take them, too
_SOURCE = {
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


def load_model(name_or_path: str | os.PathLike[str], **loading: Any) -> Any:
    """Loads a model of the class that its config names, else a causal language model; from the
    folder of a PEFT adapter, the base model with the adapter. `loading` are arguments of
    `from_pretrained` (`dtype`, `device_map`, ...), which raises the errors."""
    try:
        config = AutoConfig.from_pretrained(name_or_path, **_source_of(loading))
        architectures = config.architectures
    except (OSError, ValueError):
        # an adapter without a config, or no model: `from_pretrained` then raises
        architectures = None
    name = (architectures or [""])[0]
    model_class = getattr(transformers, name, AutoModelForCausalLM)
    return model_class.from_pretrained(name_or_path, **loading)


def _source_of(loading: dict[str, Any]) -> dict[str, Any]:
    return {name: loading[name] for name in _SOURCE if name in loading}


def load_tokenizer(name_or_path: str | os.PathLike[str], model: Any, **loading: Any) -> Any:
    """Loads the tokenizer of the model or, for an adapter without one, of its base model; `None` if
    there is none."""
    source = _source_of(loading)
    error: Exception | None = None
    for name in dict.fromkeys((str(name_or_path), model.name_or_path)):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **source)
        except (OSError, ValueError) as failure:
            error = error or failure
        else:
            # without files, transformers makes a tokenizer that has only the class's special tokens
            # and T5's space marker
            if len(tokenizer) > len(tokenizer.added_tokens_decoder) + 1:
                return tokenizer
    message = (
        "no tokenizer was found, so prompts and results are token ids: pass `tokenizer=` for text"
        " (%s)"
    )
    logger.warning(Topic.TOKENIZER(message), error or "no files")
    return None
