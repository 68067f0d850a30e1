"""A model and its tokenizer from a name or a folder, by transformers' own loading."""

from __future__ import annotations

import logging
import os
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

logger = logging.getLogger(__name__)

# options of `from_pretrained` that say where files are found, for configs and tokenizers, too
_SOURCE = {"cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder"}
_SOURCE |= {"token", "trust_remote_code"}


def load_model(name_or_path: str | os.PathLike[str], **loading: Any) -> Any:
    """The model of the class that its config names, else a causal language model; of the folder of a PEFT adapter the
    base model with it. `loading` and errors are those of `from_pretrained` (`dtype`, `device_map`, ...)."""
    source = {name: loading[name] for name in _SOURCE if name in loading}
    try:
        architectures = AutoConfig.from_pretrained(name_or_path, **source).architectures
    except (OSError, ValueError):  # there is an adapter alone, or nothing: transformers tells
        architectures = None
    found = getattr(transformers, (architectures or [""])[0], None)
    return (AutoModelForCausalLM if found is None else found).from_pretrained(name_or_path, **loading)


def load_tokenizer(name_or_path: str | os.PathLike[str], model: Any, **loading: Any) -> Any:
    """The tokenizer beside the model or, of an adapter without one, beside its base model; `None` if there is none."""
    source = {name: loading[name] for name in _SOURCE if name in loading}
    error: Exception | None = None
    for place in dict.fromkeys((str(name_or_path), model.name_or_path)):
        try:
            found = AutoTokenizer.from_pretrained(place, **source)
        except (OSError, ValueError) as failure:
            error = error or failure
        else:  # without files transformers makes one of the special tokens of its class, and the mark of a space (T5)
            if len(found) > len(found.added_tokens_decoder) + 1:
                return found
    logger.warning("no tokenizer was found, so that prompts and results are token ids (%s)", error or "no files")
    return None
