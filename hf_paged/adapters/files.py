"""LoRA adapters that PEFT saved in folders: checks, loading, and the store of loaded weights.
`pages.py` holds the blocks that account for the weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import operator
import os
import threading
import time
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..cache.free_memory import free_bytes
from ..interrupts import is_interrupt
from ..kernels.lora import LoraWeights
from ..rooms import ResolvedAdapter
from ..threads import start
from .peft_models import (
    Adapter,
    AdapterError,
    check_adapter,
    check_served,
    check_unmerged,
    has_adapter,
    peft_layers,
    unmixable_reason,
    wrapper_reason,
)
from .shards import local_shard

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SUFFIXES = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias")  # of the names of weights
# options of adapters that change more than the outputs of linear layers
UNSUPPORTED_OPTIONS = (
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
)
MAX_PREFETCHED = 2  # adapters that are loaded ahead at a time
CHUNK_BYTES = 1 << 20  # of a file, read at once
MAX_DIGESTS = 4096  # files whose hashes are cached
# after this time since its last change, a file is stable: any later change gets another timestamp,
# since file systems' clocks tick more often
STABLE_NS = 10**9
# copies in host memory take at most 1/8 of the free host memory, but one copy is always kept
HOST_MEMORY_DIVISOR = 8


class AdapterFile(NamedTuple):
    """A folder's adapter as it was when a request named it. Identifies the adapter in requests,
    prefixes and recorded steps: files with other content are another adapter."""

    path: str
    version: str  # hashes of its files' content
    num_bytes: int  # of its weights in float32


def resolve_adapter(model: nn.Module, name: str | None, has_only_ids: bool) -> ResolvedAdapter:
    """Resolves the adapter name of a request: the name of an adapter of the model or, failing that,
    of a folder in which PEFT saved one. `has_only_ids`: whether the prompt is token ids alone.
    Raises [`AdapterError`] if the adapter cannot be served, and `ValueError` if it is in a folder
    and the prompt has other inputs."""
    check_served(model, name)
    if name is None:
        return ResolvedAdapter()
    is_folder = not has_adapter(model, name) and os.path.isfile(os.path.join(name, CONFIG))
    if not is_folder:
        check_adapter(model, name)
        return ResolvedAdapter(name, name)
    check_unmerged(peft_layers(model), name, name)
    file = read_adapter_file(name)
    if not has_only_ids:
        raise ValueError(
            f"`adapter` {file.path!r} is loaded on demand, which works only for prompts of plain"
            " token ids: load it with PEFT's `model.load_adapter(folder, name)`, and pass the name"
        )
    return ResolvedAdapter(file, (file.path, file.version), file.num_bytes)


def read_adapter_file(name: str) -> AdapterFile:
    """Returns the adapter in a folder, after checking its config and the names and sizes of its
    weights. Raises [`AdapterError`] if the adapter cannot be served or read, or if PEFT is
    missing."""
    path = os.path.realpath(name)
    try:
        _read_config(path)
        weights_path = os.path.join(path, WEIGHTS)
        if not os.path.isfile(weights_path):
            raise ValueError(f"it has no {WEIGHTS}, which PEFT's `save_pretrained` writes")
        version = _version(path)
        num_values = 0
        layers = defaultdict[str, set[str]](set)  # layer names by kind of weight
        with safe_open(weights_path, "pt") as file:
            for key in file.keys():
                shape = file.get_slice(key).get_shape()
                num_tensor_values = math.prod(shape)
                if not num_tensor_values:
                    raise ValueError(f"{key} is empty: an adapter needs a rank of at least 1")
                num_values += num_tensor_values
                suffix = next((suffix for suffix in _SUFFIXES if key.endswith(suffix)), key)
                layers[suffix].add(key.removesuffix(suffix))
        unknown_keys = sorted(layers.keys() - set(_SUFFIXES))
        if unknown_keys:
            raise _unsupported(name, f"{unknown_keys[0]!r} does not belong to a linear layer")
        a_layers, b_layers, bias_layers = (layers[suffix] for suffix in _SUFFIXES)
        incomplete = sorted((a_layers ^ b_layers) | (bias_layers - a_layers))
        if incomplete:
            raise ValueError(
                f"{incomplete[0]} is missing some LoRA weights: save the adapter again"
            )
        if not a_layers:
            raise ValueError("it has no weights")
    except AdapterError:
        raise
    except Exception as error:
        if is_interrupt(error):
            raise
        raise AdapterError(name, f"the adapter in {name!r} cannot be read: {error}") from error
    return AdapterFile(path, version, 4 * num_values)


def _read_config(path: str) -> Any:
    """Returns the PEFT config in a folder. Raises [`AdapterError`] if adapters with this config
    cannot be loaded on demand, and `ImportError` without PEFT."""
    try:
        import peft
    except ImportError as error:
        message = '`adapter` is a folder, which needs PEFT: pip install "hf_paged[integrations]"'
        raise ImportError(message) from error
    config = peft.PeftConfig.from_pretrained(path)
    reason = wrapper_reason(config)
    if reason is not None:
        raise AdapterError(path, f"the adapter in {path!r} {reason}")
    if not isinstance(config, peft.LoraConfig):
        raise _unsupported(path, f"it is not a LoRA adapter ({type(config).__name__})")
    fields = dataclasses.fields(config)
    variants = [field.name for field in fields if field.metadata.get("is_lora_variant")]
    for option in (*variants, *UNSUPPORTED_OPTIONS):
        if getattr(config, option, None):
            raise _unsupported(path, f"it has `{option}`")
    return config


def _unsupported(name: str, reason: str) -> AdapterError:
    return AdapterError(
        name,
        f"the adapter in {name!r} cannot be loaded on demand: {reason}. Load it with PEFT's"
        " `model.load_adapter(folder, name)`, and pass the name: it then runs in separate forwards",
    )


def _version(path: str) -> str:
    """Returns hashes of the files' content, since copies, archives and container images may give
    different files the same times and sizes."""
    digests = []
    for name in (CONFIG, WEIGHTS):
        file = os.path.join(path, name)
        stat = os.stat(file)
        # a file that was just written may change again without a change of its timestamps
        is_stable = time.time_ns() - stat.st_ctime_ns > STABLE_NS
        digest = _digest if is_stable else _digest.__wrapped__
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        digests.append(digest(file, stat.st_dev, stat.st_ino, stat.st_size, *times))
    return "-".join(digests)


@functools.lru_cache(maxsize=MAX_DIGESTS)
def _digest(file: str, *stat: int) -> str:
    """Returns the hash of the file's content, cached while `stat` stays the same. That is safe,
    since no process can set `st_ctime_ns`, the time of the last change."""
    digest = hashlib.blake2b(digest_size=16)
    with open(file, "rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def load_adapter(model: nn.Module, file: AdapterFile) -> dict[nn.Module, LoraWeights]:
    """Loads an adapter's weights to the CPU, by module of `model`; converts half precision to
    float32 as PEFT does. Raises [`AdapterError`] if the files cannot be read or have changed since
    the request named them, or if the weights do not fit this model."""
    from peft.utils import load_peft_weights
    from peft.utils.other import get_pattern_key

    try:
        config = _read_config(file.path)
        tensors = load_peft_weights(file.path, device="cpu")
        weights: dict[nn.Module, LoraWeights] = {}
        for key in tensors:
            if not key.endswith(_SUFFIXES[0]):
                continue
            name = key.removesuffix(_SUFFIXES[0])
            a, b, bias = (tensors.get(name + suffix) for suffix in _SUFFIXES)
            layer_name = name.removeprefix("base_model.model.")
            module = model.get_submodule(layer_name)
            module = getattr(module, "base_layer", module)
            reason = unmixable_reason(module)
            if reason is not None:
                raise ValueError(f"{layer_name} {reason}")
            rank = len(a)
            width, depth = linear_shape(module)
            is_fitting = a.shape == (rank, depth) and b.shape == (width, rank)
            if not is_fitting or (bias is not None and bias.shape != (width,)):
                raise ValueError(
                    f"{layer_name} maps {depth} to {width} features, but its LoRA weights do not:"
                    " they are for another model"
                )
            pattern = get_pattern_key(config.alpha_pattern.keys(), layer_name)
            alpha = config.alpha_pattern.get(pattern, config.lora_alpha)
            scaling = alpha / (math.sqrt(rank) if config.use_rslora else rank)
            whole_weights = LoraWeights(a, b, bias, scaling).map(_copy_weight)
            weights[module] = local_shard(model, layer_name, module, whole_weights)
        if _version(file.path) != file.version:
            raise ValueError("its files have changed since the request was added: add it again")
        return weights
    except Exception as error:
        if is_interrupt(error):
            raise
        raise AdapterError(
            file,
            f"the adapter in {file.path!r} cannot be loaded: {error}",
        ) from error


def _copy_weight(weight: Tensor) -> Tensor:
    """Returns a copy of a weight in at least single precision. A copy is needed since safetensors
    maps the file into memory, and the file may be overwritten later."""
    is_half = weight.dtype.itemsize < 4
    return weight.to(torch.float32 if is_half else weight.dtype, copy=True)


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """Returns the output and input size of a linear layer."""
    first, second = module.weight.shape
    return (first, second) if isinstance(module, nn.Linear) else (second, first)


@dataclasses.dataclass
class _Prefetch:
    """Weights of an adapter that a thread loads ahead. If the thread ends without setting them,
    because loading failed or the process was forked meanwhile, `AdapterStore.get` loads them."""

    thread: threading.Thread | None = None
    weights: dict[nn.Module, LoraWeights] | None = None

    def start(self, model: nn.Module, file: AdapterFile) -> bool:
        """Starts the thread; returns whether it can be started."""

        def load() -> None:
            with contextlib.suppress(AdapterError):
                self.weights = load_adapter(model, file)

        self.thread = start(load, f"hf_paged adapter {Path(file.path).name}")
        return self.thread is not None


class AdapterStore:
    """The loaded weights of adapters in folders. Resident weights are on the model's devices until
    `forget` or `forget_stale` drops them; the caller forgets an adapter when the pool evicts it. If
    the model is not on the CPU, host memory also keeps copies of the adapters that became resident
    last."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._resident: dict[AdapterFile, Adapter] = {}
        self._prefetches: dict[AdapterFile, _Prefetch] = {}
        self._host_copies: OrderedDict[AdapterFile, dict[nn.Module, LoraWeights]] = OrderedDict()
        self._last_number = 0  # in `Adapter.key`
        self.num_loads = 0  # adapters loaded from files so far

    def __contains__(self, file: AdapterFile) -> bool:
        """Whether the adapter's weights are resident."""
        return file in self._resident

    def get(self, file: AdapterFile) -> Adapter:
        """Returns the adapter; loads its weights if needed. Raises the errors of `load_adapter`."""
        adapter = self._resident.get(file)
        if adapter is not None:
            return adapter
        cpu_weights = self._take_cpu_weights(file)
        resident_weights = {}
        is_copied = False
        for module, lora in cpu_weights.items():
            device = module.weight.device
            is_copied |= device.type != "cpu"
            resident_weights[module] = lora.map(operator.methodcaller("to", device))
        self._last_number += 1
        adapter = self._resident[file] = Adapter((file, self._last_number), resident_weights)
        if is_copied:
            self._keep_on_host(file, cpu_weights)
        return adapter

    def _take_cpu_weights(self, file: AdapterFile) -> dict[nn.Module, LoraWeights]:
        """Returns the weights on the CPU, taken from host memory or a prefetch, or else loaded."""
        weights = self._host_copies.pop(file, None)
        if weights is not None:
            return weights
        prefetch = self._prefetches.pop(file, _Prefetch())
        if prefetch.thread is not None:
            prefetch.thread.join()
        weights = prefetch.weights or load_adapter(self._model, file)
        self.num_loads += 1
        return weights

    def prefetch(self, files: list[AdapterFile]) -> None:
        """Starts to load the first `MAX_PREFETCHED` of `files`, and drops prefetched weights of
        adapters that are not among `files`."""
        for file in self._prefetches.keys() - files:
            del self._prefetches[file]
        for file in files[:MAX_PREFETCHED]:
            is_loaded = file in self._resident or file in self._host_copies
            if is_loaded or file in self._prefetches:
                continue
            prefetch = _Prefetch()
            if not prefetch.start(self._model, file):  # `get` loads the adapter
                return
            self._prefetches[file] = prefetch

    def forget(self, file: AdapterFile) -> None:
        """Drops the resident weights of an adapter."""
        self._resident.pop(file, None)

    def forget_stale(self, modules: set[nn.Module]) -> None:
        """Drops all prefetched weights, and all weights of adapters that have weights for a module
        that is not among the model's current `modules`."""
        for file, adapter in list(self._resident.items()):
            if not modules.issuperset(adapter.weights):
                self._resident.pop(file, None)
        for file, weights in list(self._host_copies.items()):
            if not modules.issuperset(weights):
                self._host_copies.pop(file, None)
        self._prefetches.clear()

    def _keep_on_host(
        self,
        file: AdapterFile,
        weights: dict[nn.Module, LoraWeights],
    ) -> None:
        copies = self._host_copies
        copies[file] = weights
        max_bytes = free_bytes(torch.device("cpu")) // HOST_MEMORY_DIVISOR
        while len(copies) > 1 and sum(file.num_bytes for file in copies) > max_bytes:
            copies.popitem(last=False)
