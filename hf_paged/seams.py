"""The seams of the core: the protocols that features implement, and `EngineParts`, which gives an
engine what implements them. No code of a feature stands here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import LogitsProcessor, PreTrainedModel

    from .batching.arguments import Assistance, RequestOptions
    from .batching.decoding.base import Draft
    from .batching.generation import Generation
    from .generation.candidate import Candidate


class Drafter(Protocol):
    """Drafts the next tokens of a loop's rows, each a generation with one row, which get the tokens
    that they would get without. `PagedEngine` makes one by `EngineParts.drafter`."""

    def attach(self, generation: Generation) -> tuple[bool, Hashable]:
        """Begins to draft for a row, whose request is not queued yet. Returns whether it also
        drafts the first new token, and the namespace within which the request shares prefixes:
        usually that of the request."""

    def detach(self, generation: Generation) -> None:
        """Ends a row, also one that is not attached, and during a step of another thread."""

    def propose(
        self, num_embeddings: int, num_rows: int
    ) -> Iterable[tuple[Generation, Draft | Exception]]:
        """Before each step, of `num_rows` rows without drafts: returns drafts, of token ids below
        `num_embeddings`, for rows that have a `sequence_to_draft`; an error ends its
        row."""

    def accepted(self, generation: Generation, num_draft_tokens: int, num_accepted: int) -> None:
        """After a step that verified a draft of a row and has appended its new tokens."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """After the forward of a step without prompts."""

    def reclaim(self) -> bool:
        """Frees the drafter's blocks, which others need; returns whether there were any."""

    def change_weights(self) -> None:
        """Between steps: notes that weights may have changed."""


MakeDrafter = Callable[..., Drafter]
"""Makes a drafter from a loop's model, `PagedConfig`, `PagedMemory`, `Runner` and `Scheduler`, in
this order; it must not keep the scheduler alive, for which it gets a weak proxy."""


class SpeculationRoom(Protocol):
    """What the core asks of `hf_paged.speculation`."""

    Speculator: MakeDrafter

    def reason_against(
        self, model: PreTrainedModel, config: Any, assistance: Assistance
    ) -> str | None:
        """Why rows with this generation config cannot be drafted for, their layout aside; `None` if
        they can."""

    def reasons_against_call(self, call: Candidate, assistance: Assistance) -> Iterable[str]:
        """Yields why rows of a `generate` call cannot; the first counts."""


class Grammars(Protocol):
    """What `hf_paged.grammar` makes for an engine. For use by several threads."""

    def processor(
        self, options: RequestOptions, tokenizer: Any, model: PreTrainedModel
    ) -> LogitsProcessor:
        """Returns the logits processor for a request's `schema`, `regex` or `grammar`. Raises
        `ValueError` and `ImportError`."""


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from. A field that is `None` stands for the part that its config asks
    for."""

    drafter: MakeDrafter | None = None


DEFAULT_PARTS = EngineParts()
