"""Rooms are hf_paged's optional features: folders or modules outside the core, each imported when a
call first needs it. This module lists and imports them, and has the protocol that each room's
module implements. The code that imports a room decides whether a call needs it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from . import forks

if TYPE_CHECKING:  # types of the core alone
    from torch import Tensor, nn
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from .batching.arguments import Assistance
    from .batching.engine_core import EngineCore
    from .batching.execution.prompts import Prompts
    from .batching.execution.runner import LogitsPart, Runner
    from .batching.generation import RequestState
    from .cache.block_manager import BlockManager
    from .cache.paged_cache import PagedCache
    from .config import PagedConfig
    from .generation.candidate import Candidate
    from .model.capability import Capability
    from .model.layout import Layout
    from .model.state import ModelState
    from .seams import (
        Adapters,
        MakeDrafter,
        MakeRecorder,
        MakeTier,
        Recorder,
        StorageFactory,
    )
    from .step import StepMetadata

Part = TypeVar("Part")

ROOMS = (
    "adapters",
    "beams",
    "fingerprints",
    "gradients",
    "grammar",
    "latent",
    "media",
    "native",
    "overlap",
    "own_attention",
    "ranks",
    "ray",
    "rectangles",
    "shared_prefill",
    "speculation",
    "tape",
    "tiers",
    "tools",
    "virtual",
)


NOT_INSTALLED = "which this installation of hf_paged lacks"


class RoomMissingError(ImportError):
    """A call needs a feature whose room this installation lacks."""


@functools.cache
def is_installed(name: str) -> bool:
    """Whether the room with this name (`ROOMS`) is installed."""
    spec = importlib.util.find_spec(f"{__package__}.{name}")
    return spec is not None and spec.origin is not None  # `None`: a folder without the module


@functools.cache
def room(name: str, option: str) -> Any:
    """Imports the room with this name (`ROOMS`) and returns its module, which implements the room's
    protocol below, if it has one. `option`: the feature that needs the room, as users write it, for
    the error message. Raises [`RoomMissingError`] if the room is not installed."""
    require(name, option)
    with forks.imports:
        return importlib.import_module(f"{__package__}.{name}")


def require(name: str, option: str) -> None:
    """Raises [`RoomMissingError`] if the room with this name, which `option` needs, is not
    installed."""
    message = missing(name, option)
    if message is not None:
        raise RoomMissingError(
            f"{message}: install all of hf_paged, or do not use this feature",
            name=f"{__package__}.{name}",
        )


def missing(name: str, option: str) -> str | None:
    """Returns a message that contains `NOT_INSTALLED` if the room with this name, which `option`
    needs, is not installed; otherwise `None`."""
    assert name in ROOMS
    return None if is_installed(name) else f"{option} needs `{__package__}.{name}`, {NOT_INSTALLED}"


def room_if_installed(name: str) -> Any | None:
    """Returns the module of the room with this name; `None` if the room is not installed."""
    return room(name, "") if is_installed(name) else None


def render(name: str, instance: object) -> str | None:
    """Returns an object as text or HTML: the result of the function `name` of the room `tools`;
    `None` if that room is not installed."""
    tools = room_if_installed("tools")
    return tools and getattr(tools, name)(instance)


class OnDemand(Generic[Part]):
    """A part that few engines and `generate` calls need. This object is called to get the part. The
    first call makes it with `make`; until then, `instance` is `None`. Without `make`, calls are not
    allowed."""

    def __init__(self, make: Callable[[], Part] | None = None) -> None:
        self._make = make
        self.instance: Part | None = None

    def __call__(self) -> Part:
        if self.instance is None:
            assert self._make is not None
            self.instance = self._make()
        return self.instance


# Protocols of the rooms' modules


class TapeRoom(Protocol):
    """`hf_paged.tape`."""

    make_recorder: MakeRecorder

    def kernel_products(self, modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
        """Returns a context for a model's forwards, other than replays, that speeds up matrix
        products in half precision. `modules`: all modules of the model."""

    def in_fixed_order(self) -> AbstractContextManager[None]:
        """A context in which hf_paged's kernels sum in an order that depends only on the row."""

    def batch_invariant_operations(self) -> AbstractContextManager[None]:
        """A context, within `in_fixed_order`, in which all operations of this thread are
        batch-invariant. An operation without a batch-invariant kernel raises `NotPackable`."""


class FingerprintsRoom(Protocol):
    """`hf_paged.fingerprints`."""

    read_state: Callable[[nn.Module], ModelState]
    """Reads and returns the state of a model. Raises errors if the model cannot be read."""

    fingerprint: Callable[[nn.Module, ModelState | None], bytes | None]
    """Like `model.state.fingerprint`, for a model for which `model.state.carries_state` is
    false."""


class ResolvedAdapter(NamedTuple):
    """The adapter that a request names."""

    key: Hashable = None  # for `Request.adapter`
    namespace: Hashable = None  # in the prefix cache; the same in every process
    num_bytes: int = 0  # bytes of the pool that the adapter takes while the request runs


class AdaptersRoom(Protocol):
    """`hf_paged.adapters`."""

    def check_wrapped(self, levels: Sequence[Any]) -> None:
        """Raises `ValueError` for an always active adapter that only PEFT's own `generate` can
        compute. `levels`: the wrappers of a model, outermost first, then the model."""

    def check_served(self, model: nn.Module, adapter: Hashable) -> None:
        """Raises `ValueError` if the model, with its layers switched to the adapter (`None`: with
        the adapters that are active now), would not compute PEFT's results."""

    def has_activated_lora(self, model: nn.Module) -> bool:
        """Whether the model has an activated LoRA (aLoRA). If so, `check_served` depends on which
        adapters are active: it may raise even if it has passed before."""

    resolve_adapter: Callable[..., ResolvedAdapter]
    """Takes a model, the option `adapter` of a request, and whether the prompt consists of token
    ids alone. Returns the request's adapter. Raises `ValueError` if it cannot be served."""

    def use_adapter(self, model: nn.Module, name: Hashable) -> AbstractContextManager[Any]:
        """A context for a forward of `model` with the adapter of this name."""

    def row_adapters(self, model: nn.Module) -> AbstractContextManager[list[str] | None]:
        """A context that hides the `adapter_names` of a call of PEFT's `generate` from the call's
        forwards. The context's value is the list of these names, one per prompt or per row. If the
        call has no names, but the code around it runs with an adapter, the list holds only the
        active adapter; it is empty if not exactly one adapter is active. `None`: the call has no
        names, and no code around it runs with an adapter."""

    wrapper_methods: Callable[[Any], Mapping[str, Callable[..., Any]]]
    """Takes the class `PeftModel`. Returns the methods that replace its own, by name, so that calls
    of several threads do not see each other's `adapter_names`."""

    make_adapters: Callable[..., Adapters]
    """Takes a model, a cache, `make_runner` and a block manager. Returns the adapters of a new
    loop."""


class TiersRoom(Protocol):
    """`hf_paged.tiers`."""

    make_tier: MakeTier

    def check(self, config: PagedConfig) -> None:
        """Creates the folder of `config.prefix_tiers`, if it is set and missing. Raises `OSError`
        if the folder cannot be used."""

    save: Callable[..., int]
    """Takes an `EngineCore`, a `Prompt`, a tokenizer, a function and a path. Writes the full blocks
    of the prompt to a file and returns the number of tokens in them. The function takes the
    prompt's token ids, computes their blocks, and returns the blocks' namespace."""

    def load(self, core: EngineCore, path: Any) -> int:
        """Loads into the prefix cache the blocks in a file that `save` wrote. Returns the number of
        tokens in them."""


class VirtualRoom(Protocol):
    """`hf_paged.virtual`."""

    make_storage: StorageFactory

    fit_blocks: Callable[..., PagedConfig]
    """Takes a config, a model's config and a device. Returns the config with the smallest block
    size, not below the given one, that fills whole pages. Raises `ValueError` if pages cannot be
    mapped or are too large."""


class NativeRoom(Protocol):
    """`hf_paged.native`."""

    replacements: Mapping[str, Callable[..., Any]]  # of methods of transformers' `ContinuousMixin`
    wrapper_methods: Mapping[str, Callable[..., Any]]  # methods for PEFT's wrapper of a model

    def set_default(self, config: PagedConfig) -> None:
        """Sets the default config of managers."""

    def destroy_kept_managers(self) -> None:
        """Destroys the managers that are kept for models' next sessions."""


class RectangleRecorder(Protocol):
    """Records the decode steps of one model's padded batches ("rectangles",
    `rectangles.rectangle.Rectangle`), and replays them."""

    def begin(self, state: ModelState | None) -> None:
        """Like `Runner.begin`: called before steps of the model in this state."""

    def run(self, rectangle: Any, prepared: dict[str, Any]) -> Tensor | None:
        """Replays a step with these model inputs, and returns logits `(rows, vocab_size)`; `None`
        if no recording serves the step. Changes the states, unless `check` must follow."""

    def outputs(self, rectangle: Any, prepared: dict[str, Any]) -> ModelOutput:
        """Returns the outputs of a replay that are known without a forward: the cache, and inputs
        that the forward returns unchanged."""

    def check(
        self,
        rectangle: Any,
        replayed: Tensor,
        expected: Tensor,
        inputs: dict[str, Any],
        outputs: Any,
        prepared: dict[str, Any],
    ) -> None:
        """Compares the logits `(rows, vocab_size)` and states of a replay with those of the model's
        own forward, as `Recorder.check` does. Also checks that the next step's inputs depend only
        on `inputs`, the inputs of this step, and on the known `self.outputs`. `outputs`: the result
        of the forward with the arguments `prepared`."""


class RectanglesRoom(Protocol):
    """`hf_paged.rectangles`."""

    def choose_layout(self, capability: Capability, reason: str) -> Layout:
        """Returns the layout for a model that cannot be packed because of `reason`. It puts rows of
        any requests side by side if each sequence then gets the same results as alone. Otherwise,
        rows stay together in the batch in which they began."""

    def reasons_against_call(self, call: Candidate, reason: str) -> Iterator[str]:
        """Yields the reasons why the engine cannot run the rows of a call; `reason` says why they
        cannot be packed. The caller reports the first reason. If there is none and the rows must
        stay together, sets the call's layout, paddings and prompts."""

    def prepare(
        self, capability: Capability, layout: Layout, state: RequestState, prompts: Prompts
    ) -> tuple[Layout, str | None]:
        """Prepares an engine's request whose prompt has inputs besides token ids. Returns the
        layout for the request's loop, and the reason why it cannot run (`None` if it can). Raises
        `IndexError` if the prompt is longer than the model's table of positions."""

    def make_runner(
        self, model: PreTrainedModel, cache: PagedCache, layout: Layout, recorder: Recorder | None
    ) -> tuple[BlockManager, Runner]:
        """Like `batching.factory.make_runner`, for rectangles."""


class GradientsRoom(Protocol):
    """`hf_paged.gradients`."""

    extend: Callable[..., tuple[Tensor, Tensor]]
    """Takes a `PagedLayer` after it stored a step's K/V, the step, the layer's `KVBlocks`, and
    these K/V with their graph. Appends them to the layer's `graph_states`. Returns all K/V that the
    step sees."""

    def detach(self, cache: PagedCache) -> None:
        """Implements `PagedCache.detach`."""


class LatentRoom(Protocol):
    """`hf_paged.latent`."""

    wrap_expansions: Callable[[Iterable[nn.Module]], None]
    """Replaces the methods with which the classes of these modules expand latents to keys and
    values. Until `unwrap_expansions` is called, the methods return `handles.LatentTensor`s where
    attention can read the latents."""

    unwrap_expansions: Callable[[], None]
    """Undoes every `wrap_expansions`."""

    can_absorb: Callable[[nn.Module], bool]
    """Whether attention can read the layer's latents without expanding them."""


class MediaRoom(Protocol):
    """`hf_paged.media`."""

    check: Callable[..., tuple[Prompts, str | None]]
    """Takes a `Capability` and `Prompts`. Returns the prompts as `MediaPrompts`, and the reason why
    packed steps cannot continue them (`None` if they can)."""

    prepare: Callable[..., str | None]
    """Takes a `Capability`, a layout, an engine's request with `Prompts`, and whether it may use
    the prefix cache. Prepares the request. Returns why it cannot run; `None` if it can. Raises
    `IndexError` if the prompt is longer than the model's table of positions."""

    run_prompts: Callable[..., LogitsPart]
    """Takes a model, an empty cache, a list of `WholePrompts` with prompts that `check` has
    returned, and the step's plan. Runs one forward of all rows of these prompts, including rows
    that the step does not compute. Returns the logits of the step's rows."""

    position_axes: Callable[..., list[list[int]] | None]
    """Takes a step's plan and the tokens' positions in their sequences. Returns
    `PackedTokens.axes`. All sequences with inputs that set positions must have the same number of
    axes."""


class OwnAttentionRoom(Protocol):
    """`hf_paged.own_attention`."""

    with_key_len: Callable[[StepMetadata], StepMetadata]
    """Returns a packed step with the `key_len` that a model's own attention code sees. Raises
    `NotPackable` if the step has a window, and `NotCapturable` if it cannot be recorded."""

    row_tensors: Callable[..., tuple[Tensor, Tensor]]
    """Takes a step from `with_key_len`, a layer's `KVBlocks`, and the dtypes that the keys and
    values should report. Returns the result of the layer's `update`: keys and values `(1, heads,
    key_len, dim)` that defer the operations on them."""


class SpeculationRoom(Protocol):
    """`hf_paged.speculation`."""

    Speculator: MakeDrafter

    def reason_against(
        self, model: PreTrainedModel, config: Any, assistance: Assistance
    ) -> str | None:
        """Returns why rows with this generation config cannot have drafts, apart from their layout;
        `None` if they can."""

    def reasons_against_call(self, call: Candidate, assistance: Assistance) -> Iterable[str]:
        """Yields the reasons why rows of a `generate` call cannot have drafts. The caller reports
        the first."""
