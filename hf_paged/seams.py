"""The seams of the core: the protocols that features implement, and `EngineParts`, which gives an
engine what implements them. No code of a feature stands here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # types of the core alone
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from .batching.decoding.base import Fetch, LogitRows
    from .batching.execution.inputs import PackedTokens
    from .batching.generation import Generation
    from .batching.request import Sequence
    from .batching.scheduling.scheduler import Scheduler
    from .cache.memory import PagedMemory
    from .cache.paged_cache import PagedCache
    from .model.state import ModelState
    from .plan import StepPlan


# -- recorded steps ------------------------------------------------------------------------------


class Recorder(Protocol):
    """Records the packed steps of a model over one memory, where it outlives their runner, and
    replays them."""

    def begin(self, state: ModelState) -> None:
        """Before steps of the model in this state: forgets what was recorded in another."""

    def run(
        self,
        tokens: PackedTokens,
        variant: Hashable,
        mix: Any,
        forward: Callable[..., Tensor],
        token_ids: Tensor | None = None,
        keeps_hidden: bool = False,
    ) -> Tensor | None:
        """Runs a step as a replay; returns logits `(len(tokens.last), vocab_size)`, which the
        caller owns, or `None` if none serves it: `forward` then computes it, from token ids and
        positions `(1, n)`, a step of each layer group, and the tokens whose logits are wanted.
        `variant` identifies the forward's adapters; `mix`: the adapters of the tokens, unless these
        are the model's. `token_ids` `(n,)`, int64, on the device, replace those of `tokens`.
        `keeps_hidden`: whether the forward also stores hidden states."""

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: orders its device work after the previous step's, also across streams."""

    def run_ahead(self, memory: PagedMemory, scheduler: Scheduler) -> RunAhead | None:
        """What launches steps before their tokens are on the host; `None` if the host computes
        replays."""

    def clear(self) -> None:
        """Forgets what was recorded: its addresses are no longer valid, or memory is needed."""


class RunAhead(Protocol):
    """Launches the next step while its input tokens are still being copied to the host."""

    def fetch(
        self,
        ready: list[tuple[Generation, LogitRows]],
        launch: Callable[[list[Sequence], Tensor], Tensor | None],
    ) -> Fetch | None:
        """Returns a function that copies the tokens of all open rows, `(n,)` in order, to the host,
        and meanwhile launches the next step; `None` if these rows need the host. `launch` returns
        logits `(n, vocab)` of sequences with these next tokens `(n,)`, or `None`."""

    def take(self, plan: StepPlan) -> tuple[Tensor | None, int]:
        """Returns logits `(n, vocab)` of the first `n` rows of a step, which were launched ahead,
        and `n`."""

    def clear(self) -> None:
        """Forgets the step that was launched."""


MakeRecorder = Callable[["PreTrainedModel", "PagedCache"], "Recorder | None"]
"""Makes the recorder of a model's steps over the memory of `cache`, the model's empty cache. `None`
if nothing can be recorded."""


class TapeRoom(Protocol):
    """`hf_paged.tape`."""

    recorder: MakeRecorder

    def own_products(self, modules: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        """Around forwards of a model with these modules, which are no replays: faster products in
        half precision."""

    def in_fixed_order(self) -> contextlib.AbstractContextManager[None]:
        """Within it, our kernels sum in an order that depends on the row only."""

    def by_kernels(self) -> contextlib.AbstractContextManager[None]:
        """Within `in_fixed_order`: makes all that this thread computes batch-invariant. Raises
        `NotPackable` before an operation without a kernel."""


# -- what an engine is built from ----------------------------------------------------------------


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from. A field that is `None` stands for the part that its config asks
    for."""

    recorder: MakeRecorder | None = None


DEFAULT_PARTS = EngineParts()
