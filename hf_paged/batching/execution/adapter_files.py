"""LoRA adapters in folders saved by PEFT: checks, loading, and the store of loaded ones."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ...cache.storage import free_bytes
from ...kernels.lora import LoraWeights
from .adapter_shards import own_part
from .adapters import (
    BASE,
    Adapter,
    AdapterError,
    check_adapter,
    check_served,
    has_adapter,
    unmixable_layer,
    wrapper_reason,
)

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PARTS = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias")
NUM_AHEAD = 2  # adapters that are prefetched
CHUNK_BYTES = 1 << 20  # of a file, read at once
MAX_DIGESTS = 4096  # files whose hashes are kept
HOST_SHARE = 8  # copies in host memory take at most this fraction (1/8) of its free memory


class AdapterFile(NamedTuple):
    """A folder as it was when a request named it; identifies the adapter in requests, prefixes and recorded steps.
    Another version is another adapter."""

    path: str
    version: str  # hash of its files' content
    num_bytes: int  # of its weights in float32


def is_adapter_folder(name: str) -> bool:
    return os.path.isfile(os.path.join(name, CONFIG))


def resolve_adapter(model: nn.Module, name: str | None) -> str | AdapterFile | None:
    """Resolves the name in a request: an adapter of the model, else one in a folder saved by PEFT. Raises
    [`AdapterError`]."""
    check_served(model, name)
    if name is None or has_adapter(model, name) or not is_adapter_folder(name):
        if name is not None:
            check_adapter(model, name)
        return name
    check_adapter(model, BASE)
    return read_adapter_file(name)


def adapter_namespace(adapter: Hashable) -> Hashable:
    """The adapter's namespace in the prefix cache, the same in every process."""
    return (adapter.path, adapter.version) if isinstance(adapter, AdapterFile) else adapter


def read_adapter_file(name: str) -> AdapterFile:
    """Reads a folder's config and its weights' shapes. Raises [`AdapterError`], a `ValueError`, with the reason if the
    adapter cannot be served or read, or if PEFT is missing."""
    path = os.path.realpath(name)
    try:
        _find_config(path)
        if not os.path.isfile(os.path.join(path, WEIGHTS)):
            raise ValueError(f"it has no {WEIGHTS}, which PEFT's `save_pretrained` writes")
        version = _version(path)
        num_numbers, layers = 0, defaultdict[str, set[str]](set)  # layer names by the kind of weight
        with safe_open(os.path.join(path, WEIGHTS), "pt") as file:
            for key in file.keys():
                numbers = math.prod(file.get_slice(key).get_shape())
                if not numbers:
                    raise ValueError(f"{key} is empty: an adapter's rank is at least 1")
                num_numbers += numbers
                part = next((part for part in _PARTS if key.endswith(part)), key)
                layers[part].add(key.removesuffix(part))
        if other := sorted(layers.keys() - set(_PARTS)):
            raise _not_served(name, f"it has {other[0]!r}, which is not of a linear layer")
        a, b, bias = (layers[part] for part in _PARTS)
        if odd := sorted((a ^ b) | (bias - a)):
            raise ValueError(f"of {odd[0]} it has but a part of the weights: save it again")
        if not a:
            raise ValueError("it has no weights")
    except AdapterError:
        raise
    except Exception as error:
        raise AdapterError(name, f"the adapter in {name!r} cannot be read: {error}") from error
    return AdapterFile(path, version, 4 * num_numbers)


def _find_config(path: str) -> Any:
    try:
        import peft
    except ImportError as error:
        message = '`adapter` names a folder, which PEFT reads: pip install "hf_paged[integrations]"'
        raise ImportError(message) from error
    config = peft.PeftConfig.from_pretrained(path)
    if (reason := wrapper_reason(config)) is not None:
        raise AdapterError(path, f"the adapter in {path!r} {reason}")
    if not isinstance(config, peft.LoraConfig):
        raise _not_served(path, f"it is no LoRA adapter ({type(config).__name__})")
    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    for option in (*variants, "modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"):
        if getattr(config, option, None):
            raise _not_served(path, f"it has `{option}`")
    return config


def _not_served(name: str, reason: str) -> AdapterError:
    return AdapterError(
        name,
        f"the adapter in {name!r} is not loaded on demand: {reason}. Load it with PEFT's `model.load_adapter(folder, "
        "name)`, and pass the name: it then runs in forwards of its own",
    )


def _version(path: str) -> str:
    """Hashes the content: copies, archives and images of containers may give other files the same times and sizes."""
    digests = []
    for name in (CONFIG, WEIGHTS):
        file = os.path.join(path, name)
        stat = os.stat(file)
        digests.append(_digest(file, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return "-".join(digests)


@functools.lru_cache(maxsize=MAX_DIGESTS)
def _digest(file: str, *stat: int) -> str:
    """The content's hash while the file is as `stat` says; no process can set `st_ctime_ns`, the last change's time."""
    digest = hashlib.blake2b(digest_size=16)
    with open(file, "rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def load_adapter(model: nn.Module, file: AdapterFile) -> dict[nn.Module, LoraWeights]:
    """Loads the weights by module of `model`, on the CPU; half precision becomes float32, as in PEFT. Raises
    [`AdapterError`] if they do not fit this model, or if the files have changed since the request named them."""
    from peft.utils import load_peft_weights
    from peft.utils.other import get_pattern_key

    try:
        config, tensors = _find_config(file.path), load_peft_weights(file.path, device="cpu")
        parts: dict[nn.Module, LoraWeights] = {}
        names = [key.removesuffix(_PARTS[0]) for key in tensors if key.endswith(_PARTS[0])]
        for name in names:
            a, b, bias = (tensors.get(name + part) for part in _PARTS)
            own = name.removeprefix("base_model.model.")
            module = model.get_submodule(own)
            module = getattr(module, "base_layer", module)
            if (reason := unmixable_layer(module)) is not None:
                raise ValueError(f"{own} {reason}")
            rank, width, depth = len(a), *linear_shape(module)
            if a.shape != (rank, depth) or b.shape != (width, rank) or (bias is not None and bias.shape != (width,)):
                raise ValueError(f"{own} takes {depth} numbers and gives {width}, its weights are of another model")
            alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), own), config.lora_alpha)
            scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
            # copies: safetensors maps the file, which may be overwritten later
            a, b, bias = (None if x is None else x.to(_dtype(x), copy=True) for x in (a, b, bias))
            parts[module] = own_part(model, own, module, LoraWeights(a, b, bias, scaling))
        if _version(file.path) != file.version:
            raise ValueError("its files were changed since the request was added: add it again")
        return parts
    except Exception as error:
        raise AdapterError(file, f"the adapter in {file.path!r} cannot be loaded: {error}") from error


def _dtype(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.dtype.itemsize < 4 else weight.dtype


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """Output and input size of a linear layer."""
    shape = tuple(module.weight.shape)
    return shape if isinstance(module, nn.Linear) else (shape[1], shape[0])


@dataclasses.dataclass
class _Loading:
    """An adapter being loaded by a thread, which ends when it is loaded."""

    thread: threading.Thread
    parts: dict[nn.Module, LoraWeights] | None = None
    error: AdapterError | None = None


class AdapterStore:
    """The loaded weights of adapters in folders. Placed ones are where the model computes, and `forget` is called when
    one is evicted from the pool. For a model on a device, copies of the last used ones also stay in host memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._placed: dict[AdapterFile, Adapter] = {}
        self._loading: dict[AdapterFile, _Loading] = {}
        self._host: OrderedDict[AdapterFile, dict[nn.Module, LoraWeights]] = OrderedDict()
        self._numbers = 0
        self.num_loads = 0  # from files

    def __contains__(self, file: AdapterFile) -> bool:
        """Whether its weights are placed where the model computes."""
        return file in self._placed

    def get(self, file: AdapterFile) -> Adapter:
        """Returns its weights, and loads them if needed. Raises [`AdapterError`]."""
        if (found := self._placed.get(file)) is not None:
            return found
        parts = self._take(file)
        placed = {module: _on(lora, module.weight.device) for module, lora in parts.items()}
        self._numbers += 1
        adapter = self._placed[file] = Adapter((file, self._numbers), placed)
        if any(module.weight.device.type != "cpu" for module in parts):
            self._keep(file, parts)
        return adapter

    def _take(self, file: AdapterFile) -> dict[nn.Module, LoraWeights]:
        if (known := self._host.pop(file, None)) is not None:
            return known
        loading = self._loading.pop(file, None)
        if loading is not None:
            loading.thread.join()
            if loading.error is not None:
                raise loading.error
        self.num_loads += 1
        # after a fork, the thread does not exist in the child and has left nothing
        return load_adapter(self._model, file) if loading is None or loading.parts is None else loading.parts

    def prefetch(self, files: list[AdapterFile]) -> None:
        """Starts to load the adapters of waiting requests; drops other prefetched ones."""
        for file in [known for known in self._loading if known not in files]:
            del self._loading[file]
        for file in files[:NUM_AHEAD]:
            if file in self._placed or file in self._loading or file in self._host:
                continue
            loading = _Loading(threading.Thread(name=f"adapter {Path(file.path).name}", daemon=True))
            loading.thread = threading.Thread(target=self._load, args=(file, loading), daemon=True)
            self._loading[file] = loading
            loading.thread.start()

    def _load(self, file: AdapterFile, loading: _Loading) -> None:
        try:
            loading.parts = load_adapter(self._model, file)
        except AdapterError as error:
            loading.error = error

    def forget(self, file: AdapterFile) -> None:
        """Drops the placed weights."""
        self._placed.pop(file, None)

    def forget_others(self, modules: set[nn.Module]) -> None:
        """Drops weights of modules other than these, which the model has now."""
        self._placed = {file: x for file, x in self._placed.items() if modules.issuperset(x.parts)}
        self._host = OrderedDict((file, parts) for file, parts in self._host.items() if modules.issuperset(parts))
        self._loading.clear()

    def _keep(self, file: AdapterFile, parts: dict[nn.Module, LoraWeights]) -> None:
        self._host[file] = parts
        limit = free_bytes(torch.device("cpu")) // HOST_SHARE
        while len(self._host) > 1 and sum(known.num_bytes for known in self._host) > limit:
            self._host.popitem(last=False)


def _on(lora: LoraWeights, device: torch.device) -> LoraWeights:
    bias = None if lora.bias is None else lora.bias.to(device)
    return LoraWeights(lora.a.to(device), lora.b.to(device), bias, lora.scaling, lora.group)
