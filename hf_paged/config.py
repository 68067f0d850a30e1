"""`PagedConfig`: every option of the paged memory and of the engine, with units and validation. The
module allocates nothing, and imports torch only for some error messages."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 4, 256
AUTO = "auto"
MAX_VIRTUAL_BLOCK_SIZE = 1 << 14  # enough for blocks that fill pages of 2 MiB
SPECULATION = (None, "ngram")
PREEMPTION = ("auto", "recompute", "swap")
KV_DTYPES = ("int8", "fp8_e4m3", "fp8_e5m2")
MAX_PAGE_BYTES = 2 << 20
_REMOVED_OPTIONS = {
    "background": "remove it. Mapping in a thread took longer than mapping on demand, and"
    " `blocks_ahead` maps ahead without a thread",
}
# environment variable with JSON that overrides the defaults in this process
CONFIG_VARIABLE = "HF_PAGED_CONFIG"
# environment variable with the options that the import passes to `install`
INSTALL_VARIABLE = "HF_PAGED_INSTALL"


def is_whole(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Returns a shortened `repr` on one line; if `repr` fails, a text with the type's name."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception as error:  # an object's `__repr__` fails, or an integer has too many digits
        from .interrupts import is_interrupt  # imports torch

        if is_interrupt(error):
            raise
        return f"a value of type {type(value).__name__}"


def suggest(names: Iterable[str], valid: Iterable[str]) -> str:
    """Returns the end of a message about unknown `names`: a question with similar `valid` names, or
    an empty string if none is similar."""
    names = sorted(names)
    valid = list(valid)
    hints = []
    for name in names:
        if name not in valid:
            instead = f" instead of `{name}`" if len(names) > 1 else ""
            close = difflib.get_close_matches(name, valid, n=1, cutoff=0.7)
            hints += [f"`{match}`{instead}" for match in close]
    return f": did you mean {', '.join(hints)}?" if hints else ""


def _check_names(
    owner: str,
    names: Iterable[Any],
    cls: type,
    error_class: type[Exception] = ValueError,
) -> None:
    """Raises an `error_class` if `cls` lacks any of the options `names`. The message calls the
    object with these options `owner`."""
    valid = list(cls.__annotations__)
    unknown = sorted(str(name) for name in names if name not in valid)
    if not unknown:
        return
    for option in unknown:
        if option in _REMOVED_OPTIONS:
            raise error_class(
                f"{owner} has no option `{option}` any more: {_REMOVED_OPTIONS[option]}"
            )
    # imported here, since the command `run` must not import transformers
    from transformers import GenerationConfig

    quoted_names = ", ".join(f"`{name}`" for name in unknown)
    generate_options = set(unknown) & set(vars(GenerationConfig()))
    hint = suggest(unknown, valid) or "."
    if generate_options:
        hint = f": `{min(generate_options)}` is an argument of `generate`."
    raise error_class(
        f"{owner} has no option {quoted_names}{hint} The options are {', '.join(valid)}"
    )


def _from_dict(cls: type[T], name: str, value: Any, allowed: str) -> T:
    """Makes a `cls` from the dict `value` of the argument `name`. Raises `ValueError` for unknown
    keys, and for a value that is not a dict: `allowed` tells the user what the argument accepts."""
    if not isinstance(value, Mapping):
        raise ValueError(f"`{name}` is {shown(value)}: it must be {allowed}")
    _check_names(f"`{name}`", value, cls)
    return cls(**value)


def _refusing_unknown_options(cls: type[T]) -> type[T]:
    """Decorates a dataclass: unknown options raise a `TypeError` that suggests valid ones."""
    init = cls.__init__

    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **options: Any) -> None:
        _check_names(f"`{cls.__name__}`", options, cls, TypeError)
        init(self, *args, **options)

    cls.__init__ = checked_init  # type: ignore[assignment, method-assign]
    return cls


@contextlib.contextmanager
def _naming_variable() -> Iterator[None]:
    """Adds the name of the environment variable to errors about its values."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{CONFIG_VARIABLE} sets invalid defaults: {error}") from None


def _with_environment_defaults(cls: type) -> type:
    """Decorates `PagedConfig`: overrides the defaults of its options with the values in the
    environment variable `CONFIG_VARIABLE`."""
    text = os.environ.get(CONFIG_VARIABLE) or "{}"
    try:
        defaults = json.loads(text)
    except ValueError:
        defaults = None
    if not isinstance(defaults, dict):
        raise ValueError(
            f"{CONFIG_VARIABLE} is {text!r}: it must be a JSON object, such as"
            ' {"num_blocks": 4096}'
        )
    _check_names(CONFIG_VARIABLE, defaults, cls)
    with _naming_variable():
        for name, value in defaults.items():
            if name in _NESTED_TYPES:
                value = _NESTED_TYPES[name].coerce(value)
            elif isinstance(value, (list, dict)):
                raise ValueError(f"`{name}` is {shown(value)}: it must be a single value")
            setattr(cls, name, value)
    return cls


@_refusing_unknown_options
@dataclass(frozen=True)
class PrefixTiers:
    """
    Storage tiers for prefix blocks that the pool evicts. Later prompts can restore blocks from
    them.

    A block is copied to host memory when it is evicted, when its pool is released or when the
    process ends. A thread writes the copy to disk once the weights that computed the block are
    fingerprinted. They are fingerprinted at the latest when 64 MiB of blocks wait for that, or when
    an engine has no more requests. Newly evicted blocks are lost while the blocks that wait for a
    fingerprint or a write take more than 256 MiB plus a quarter of the free host memory. If the
    disk is full, writing is tried again after a minute. If the folder itself fails later
    (permission lost, `EIO`, `ESTALE`), the disk tier is off until a new engine, or a call after
    `free`, tries it again. An engine that is garbage-collected without `free` does not write its
    cached blocks.

    Args:
        disk_path (`str` or path, *optional*):
            Folder, created with mode 700 if missing, that processes and engines of one user may
            share. It holds blocks of any model, each in a safetensors file whose name is a hash of
            everything that the block depends on. If the folder cannot be created, listed or
            entered, the engine's constructor, or the first call, raises `OSError`. `None`: no disk
            tier.
        disk_bytes (`int`, defaults to 16 GiB):
            Maximum size of these files in bytes; the least recently used are deleted first.
        host_bytes (`int`, defaults to 4 GiB):
            Maximum host memory in bytes for blocks of a pool on another device, not counting blocks
            that wait for a fingerprint or to be written to disk. A pool in host memory has no host
            tier.

    Raises:
        ValueError: if a value is out of range.
        TypeError: for an unknown option.
    """

    disk_path: str | os.PathLike[str] | None = None
    disk_bytes: int = 16 << 30
    host_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        path = self.disk_path
        if isinstance(path, os.PathLike):
            object.__setattr__(self, "disk_path", os.fspath(path))
        elif path is not None and (not isinstance(path, str) or not path):
            raise ValueError(f"`disk_path` is {path!r}: it must be None or the path of a folder")
        for name in ("disk_bytes", "host_bytes"):
            value = getattr(self, name)
            if not is_whole(value) or value < 0:
                raise ValueError(
                    f"`{name}` is {value!r}: it must be a whole number of at least 0 (bytes)"
                )
            object.__setattr__(self, name, int(value))

    @classmethod
    def coerce(cls, value: Any) -> PrefixTiers | None:
        """Converts a config value: `None`, a `PrefixTiers`, a dict of its fields, or the path of
        the folder. Raises `ValueError` for others."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, (str, os.PathLike)):
            return cls(value)
        allowed = "None, a folder's path or a `PrefixTiers`"
        return _from_dict(cls, "prefix_tiers", value, allowed)


@_refusing_unknown_options
@dataclass(frozen=True)
class VirtualStorage:
    """Presents the keys and values of a row as plain strided tensors: pages are mapped on demand
    into the row's reserved address range (vAttention, arXiv 2405.04437). For models on the CPU
    under Linux, and on CUDA devices with `cuda.bindings`; elsewhere a call raises `ValueError`
    before it allocates memory.

    A model's own code reads a batch as one view if the paddings of the batch's rows differ only by
    whole blocks, otherwise as a copy. The values of a view do not change after the view's step.
    Rows take at most half of the mappings that the system allows a process (`vm.max_map_count`).
    When more are needed, rows that have ended lose their mappings first. If that is not enough,
    keys and values are gathered from their blocks, and the log says so. A child process (`os.fork`)
    gets its own copy of the pages.

    Args:
        page_bytes (`int`, *optional*):
            Bytes of a page group, the smallest unit that is mapped: a power of two, a multiple of
            the system's or device's page size, up to 2 MiB. `None`: one page.
        keep_mappings (`bool`, defaults to `True`):
            Keep a finished row's mappings for the next row that gets the same blocks (deferred
            reclamation, section 6.1.2). `False`: unmap the addresses before another row gets them.
        blocks_ahead (`int`, defaults to 0):
            Number of extra blocks to map together with a row's last block (eager mapping): the
            blocks that follow it in the pool. The pool then allocates blocks in contiguous runs.

    Raises:
        ValueError: if a value is out of range.
        TypeError: for an unknown option.
    """

    page_bytes: int | None = None
    keep_mappings: bool = True
    blocks_ahead: int = 0

    def __post_init__(self) -> None:
        size = self.page_bytes
        if size is not None and not (
            is_whole(size) and 0 < size <= MAX_PAGE_BYTES and not size & (size - 1)
        ):
            raise ValueError(
                f"`page_bytes` is {size!r}: it must be None or a power of two up to"
                f" {MAX_PAGE_BYTES:,} (bytes)"
            )
        if not is_whole(self.blocks_ahead) or self.blocks_ahead < 0:
            raise ValueError(
                f"`blocks_ahead` is {self.blocks_ahead!r}: it must be a whole number of at least 0"
            )
        if not isinstance(self.keep_mappings, bool):
            raise ValueError(f"`keep_mappings` is {self.keep_mappings!r}: it must be True or False")

    @classmethod
    def coerce(cls, value: Any) -> VirtualStorage | str:
        """Converts a config value: `"blocks"`, `"virtual"`, a `VirtualStorage` or a dict of its
        fields. Raises `ValueError` for others."""
        if isinstance(value, cls) or value == "blocks":
            return value
        if value == "virtual":
            return cls()
        return _from_dict(cls, "storage", value, "'blocks', 'virtual' or a `VirtualStorage`")


_NESTED_TYPES: dict[str, Any] = {"prefix_tiers": PrefixTiers, "storage": VirtualStorage}


@_refusing_unknown_options
@dataclass(frozen=True)
@_with_environment_defaults
class PagedConfig:
    """The options of the paged key/value memory. Pass a `PagedConfig`, or a dict of its options, as
    `cache_config`. The environment variable HF_PAGED_CONFIG, which `python -m hf_paged run --set`
    writes, overrides the defaults with JSON.

    Args:
        block_size (`int` or `str`, defaults to 16):
            Tokens per block; a power of two from 4 to 256, or to 16,384 with `storage="virtual"`
            (PagedAttention, arXiv 2309.06180, section 7.2). `"auto"`: chosen for each layer group
            to waste the least memory and kernel time, from the lengths of earlier sequences and the
            times that `benchmarks.tune` measured (docs/guide/memory.md); `num_blocks` must then be
            `None`.
        num_blocks (`int`, *optional*):
            Maximum number of blocks in use at once, over all layer groups (full attention, each
            sliding window, cross attention, the states of a sequence). `None`: as many as the call
            needs.
        memory_fraction (`float`, *optional*):
            Maximum share, in (0, 1], of the memory that is free when the pool allocates its first
            blocks, or does so again after its memory was released. `None`: limited only by free
            memory and `hf_paged.budget`.
        prefix_caching (`bool`, defaults to `True`):
            Keep full blocks after their request ends, for prompts that begin with the same tokens.
            They are evicted when blocks are needed, and when the model's weights or active adapter
            change. Without a limit, an engine allocates more memory instead of evicting them, up to
            two cached blocks for each block of its peak use.
        kv_dtype (`str`, *optional*):
            Store keys and values in one byte per number, `"int8"`, `"fp8_e4m3"` or `"fp8_e5m2"`,
            with a float32 scale per token and head: about half the bytes of bfloat16. Attention
            reads them in place. The generated tokens then come from rounded keys and values, and
            may differ from plain `generate`. States of linear attention are not quantized.
            `None`: the dtype in which the model computes.
        max_num_batched_tokens (`int`, defaults to 2048):
            Maximum number of tokens in one forward of the engine. Prompts that do not fit beside
            the decoding sequences are computed in chunks (SARATHI, arXiv 2308.16369). A prompt that
            cannot be split may exceed the limit.
        max_chunk_tokens (`int`, *optional*):
            Maximum number of prompt tokens in a packed forward that also decodes, so that prefill
            does not stall running requests (stall-free batching of Sarathi-Serve, arXiv 2403.02310,
            section 4.2). A lower limit shortens the gaps between tokens and delays first tokens.
            Prompts that cannot be split (images, audio) then begin one per forward. `None`: 256 on
            the CPU, elsewhere as many as `max_num_batched_tokens` leaves.
        max_num_seqs (`int`, defaults to 256):
            Maximum number of sequences that a `PagedEngine` runs at once; a request with more
            sequences runs alone. If forwards are packed, `max_num_batched_tokens` also limits this
            number, so that every sequence can decode in every step. `generate` runs all rows of its
            call.
        preemption (`str`, defaults to `"auto"`):
            How a request frees its blocks when another one needs them: `"recompute"` drops its keys
            and values, `"swap"` copies them to host memory, `"auto"` does whichever is faster by
            measured speeds (PagedAttention, arXiv 2309.06180, section 4.5). If the model has
            changed since it computed the keys and values, they are copied whenever possible.
        capture (`bool`, defaults to `True`):
            Record decode steps and replay them. With the Triton kernels they become CUDA graphs, as
            do steps with up to 512 prompt tokens. On the CPU they become lists of C++ calls: small
            operations are fused, and hf_paged's kernels compute matrix products of few rows (in
            half precision up to 64 rows, or 256 with AMX or where PyTorch has no kernel for the
            dtype). A model whose forward synchronizes with the device or draws random numbers runs
            without recordings, and the log says so. A forward's side effects other than on tensors
            (a counter, a log) happen only while recording. Recordings are kept with the pool;
            `hf_paged.free(model)` or `engine.free()` frees both.
        batch_invariant (`bool`, defaults to `False`):
            Compute the same bits for a row whatever the batch and schedule: alone or in any batch,
            in chunks, after preemption, with or without cached prefixes. Only on the CPU, with the
            C++ kernels, for models whose forwards are packed; otherwise calls raise `ValueError`.
            Steps are slower (docs/guide/engine.md). Named after Thinking Machines'
            `batch_invariant_ops` and vLLM's option.
        cache_salt (`str`, *optional*):
            Identifies the tenant. Cached blocks serve only requests with the salt of the request
            that computed them, so that time to first token reveals nothing about other tenants'
            prompts (as vLLM's `cache_salt`). Derive the salt from the authenticated tenant, not
            from request data: requests with equal salts share blocks. A saved `GenerationConfig`
            holds the salt as plain text. `PagedEngine.add_request` takes one per request. `None`:
            all requests without a salt share blocks.
        idle_release_seconds (`float`, *optional*, defaults to 60):
            Seconds without a call after which the pool's memory is returned to the system, together
            with cached prefixes and, unless the model is on the CPU under Linux, recorded steps.
            The next call allocates again and generates the same tokens. 0: the memory is returned
            after each call, or once an engine has no unfinished request, for example when training
            follows each rollout. `None`: it is returned only by `hf_paged.free(model)` or
            `engine.free()`, or if `hf_paged.budget` needs it. Blocks that a caller's cache holds
            keep the pool alive.
        speculation (`str`, *optional*):
            `"ngram"` (prompt lookup decoding): if a row's last tokens have occurred before, in its
            text or in the output of other requests with its `cache_salt`, the tokens that followed
            them become a draft, which one forward verifies. Generated tokens do not change. A row
            whose drafts are rejected stops drafting for a while, longer each time. Several sampled
            rows of one `generate` call have no drafts, since they draw from one random stream.
            `None`: drafts only for calls and requests that ask for them
            (`prompt_lookup_num_tokens`, `assistant_model`).
        prefix_tiers ([`PrefixTiers`], `dict`, `str` or path, *optional*):
            Host memory and disk for prefix blocks that the pool evicts; a `str` or path is the
            folder. Requires `prefix_caching=True`. `None`: evicted blocks are dropped.
        storage (`str`, [`VirtualStorage`] or `dict`, defaults to `"blocks"`):
            `"virtual"`: a row's blocks are also mapped into a contiguous address range. A model's
            custom attention code, and PyTorch on hosts without a C++ compiler, then read keys and
            values without gathering. A `block_size` too small to fill whole pages is increased.
            Requires `kv_dtype=None`. A [`VirtualStorage`], or a dict of its fields, sets the
            details. `"blocks"`: keys and values are in blocks only.

    Raises:
        ValueError: if a value is out of range; the message names the option, the value and the
            limits.
        TypeError: for an unknown option.
    """

    block_size: int | str = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    prefix_caching: bool = True
    kv_dtype: str | None = None
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    max_num_seqs: int = 256
    preemption: str = "auto"
    capture: bool = True
    batch_invariant: bool = False
    cache_salt: str | None = None
    idle_release_seconds: float | None = 60.0
    speculation: str | None = None
    prefix_tiers: PrefixTiers | Mapping[str, Any] | str | os.PathLike[str] | None = None
    storage: VirtualStorage | Mapping[str, Any] | str = "blocks"

    def __post_init__(self) -> None:
        size: Any = self.block_size
        max_size = MAX_BLOCK_SIZE if self.storage == "blocks" else MAX_VIRTUAL_BLOCK_SIZE
        is_size = is_whole(size) and MIN_BLOCK_SIZE <= size <= max_size and not size & (size - 1)
        is_auto = isinstance(size, str) and size == AUTO
        allowed = f"'auto', or a power of two from {MIN_BLOCK_SIZE} to {max_size} (tokens)"
        self._check("block_size", is_size or is_auto, allowed)
        at_least_one = "a whole number of at least 1"
        for name in ("num_blocks", "max_chunk_tokens"):
            value = getattr(self, name)
            self._check(name, value is None or _is_count(value), f"None or {at_least_one}")
        allowed = (
            "None with `block_size` 'auto', whose blocks differ in size: limit bytes with"
            " `memory_fraction` or `hf_paged.budget`"
        )
        self._check("num_blocks", self.num_blocks is None or not is_auto, allowed)
        fraction = self.memory_fraction
        is_fraction = fraction is None or (_is_number(fraction) and 0 < fraction <= 1)
        self._check("memory_fraction", is_fraction, "None or a number above 0 and at most 1")
        for name in ("prefix_caching", "capture", "batch_invariant"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            self._check(name, _is_count(getattr(self, name)), at_least_one)
        is_dtype = self.kv_dtype is None or self.kv_dtype in KV_DTYPES
        self._check("kv_dtype", is_dtype, f"None or one of {', '.join(map(repr, KV_DTYPES))}")
        choices = f"one of {', '.join(map(repr, PREEMPTION))}"
        self._check("preemption", self.preemption in PREEMPTION, choices)
        self._check("speculation", self.speculation in SPECULATION, "None or 'ngram'")
        check_cache_salt(self.cache_salt)
        seconds = self.idle_release_seconds
        is_time = seconds is None or (_is_number(seconds) and 0 <= seconds < float("inf"))
        allowed = "None or a finite number of at least 0 (seconds)"
        self._check("idle_release_seconds", is_time, allowed)
        object.__setattr__(self, "prefix_tiers", PrefixTiers.coerce(self.prefix_tiers))
        is_valid = self.prefix_tiers is None or self.prefix_caching
        allowed = "None with `prefix_caching=False`, which keeps no blocks"
        self._check("prefix_tiers", is_valid, allowed)
        object.__setattr__(self, "storage", VirtualStorage.coerce(self.storage))
        allowed = (
            "None with `storage` 'virtual', since quantized blocks cannot be viewed as plain"
            " tensors"
        )
        self._check("kv_dtype", self.kv_dtype is None or self.storage == "blocks", allowed)

    def _check(self, name: str, is_allowed: bool, allowed: str) -> None:
        if not is_allowed:
            raise ValueError(f"`{name}` is {shown(getattr(self, name))}: it must be {allowed}")

    @classmethod
    def coerce(
        cls, value: PagedConfig | Mapping[str, Any] | None, name: str = "cache_config"
    ) -> PagedConfig:
        """Converts the argument `name` to a `PagedConfig`; `None` gives the defaults. Raises
        `ValueError` for other types, unknown keys and invalid values."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        allowed = 'None, a `PagedConfig` or a dict of its options, such as {"num_blocks": 4096}'
        return _from_dict(cls, name, value, allowed)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain dict that a `GenerationConfig` stores and saves."""
        return {
            name: value.item() if hasattr(value, "item") else value
            for name, value in asdict(self).items()
        }


def check_cache_salt(value: Any) -> None:
    """Raises `ValueError` unless `value` is a valid `cache_salt`: `None`, or text that is not
    empty, since an empty salt probably stands for a missing tenant."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(
            f"`cache_salt` is {value!r}: it must be None or text of at least one character"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 1


with _naming_variable():  # validates the defaults at the import, not in the first call
    PagedConfig()
