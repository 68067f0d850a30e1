"""Candidates for a row's next tokens, which one forward verifies (speculative decoding, arXiv 2211.17192; prompt
lookup; transformers' candidate generators): where they come from, and how many of them a row's own acceptance pays for.
What is accepted is what the row would have got token by token: the step's logits are sampled position after position,
as always, for as long as the token chosen is the candidate."""

from __future__ import annotations

import contextlib
import itertools
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ...interrupts import let_in, step_lock
from .scores import draw

NGRAM = 3  # tokens that must have come before
MAX_DRAFT = 16  # candidates of a row by n-grams
INDEX_SIZE = 1 << 16  # n-grams of other texts that are kept
_SIZE = array("q").itemsize  # bytes of a token


@dataclass(frozen=True)
class Assistance:
    """What a caller passes to `generate`, or with a request, beside its generation config."""

    model: Any = None  # a smaller `PreTrainedModel`
    tokenizer: Any = None  # the target's, where the assistant has another
    assistant_tokenizer: Any = None
    ngrams: bool = False  # where nothing else proposes

    def by_heads(self, config: Any) -> bool:
        """Whether the model's own heads for several tokens propose (`use_mtp`), as transformers chooses."""
        return bool(config.use_mtp) and config.assistant_early_exit is None and config.prompt_lookup_num_tokens is None

    @property
    def is_joint(self) -> bool:
        """Whether it is a model with the target's tokens, whose rows run together."""
        return self.model is not None and (self.tokenizer is None or self.assistant_tokenizer is None)

    def is_asked_for(self, config: Any) -> bool:
        """Whether transformers would call it assisted generation, with this generation config."""
        given = self.model, config.prompt_lookup_num_tokens, config.assistant_early_exit, config.use_mtp or None
        return any(each is not None for each in given)


@dataclass
class Draft:
    """What a row proposed in this step: `tokens`, or the first of them, are verified. With `scores` `(n, vocab)`, the
    logits that the `n` tokens were drawn from, these are accepted as in algorithm 1 of the paper; `levels` are the
    numbers that it draws for all of them before."""

    tokens: list[int]
    scores: Tensor | None = None
    levels: Tensor | None = None
    drawn: list[int] = field(init=False)  # all tokens: the first that is not verified may be the next one all the same
    position: int = field(default=0, init=False)  # of the token that is chosen now

    def __post_init__(self) -> None:
        self.drawn = list(self.tokens)

    def forget(self, first: int) -> None:
        """Of the tokens from here on nothing is known."""
        del self.tokens[first:], self.drawn[first:]

    def sample(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """The next token `(1,)` by `(1, vocab)` probabilities: the candidate, or one of the residual distribution."""
        assert self.scores is not None and self.levels is not None
        if self.position < len(self.drawn):
            token = self.drawn[self.position]
            proposed = self.scores[self.position : self.position + 1].softmax(dim=-1)
            if bool(self.levels[self.position] <= probs[0, token] / proposed[0, token]):
                return torch.tensor([token], device=probs.device)
            residual = (probs - proposed).clamp(min=0)
            mass = residual.sum()
            probs = residual / mass if float(mass) > 0 else probs  # zero where both are equal but for rounding
        return draw(probs, generator)


class Source(Protocol):
    """What proposes candidates for one row (`Ngrams`, `Generated`). For an `AssistantRow` its `Assistant` does, for all
    of its rows together."""

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        """Up to `count` candidates behind these tokens."""

    def observe(self, token_ids: list[int], num_accepted: int) -> None:
        """`num_accepted` tokens of the last draft were accepted; `token_ids` are those that the row has now."""

    def close(self) -> None:
        """The row has ended."""


class StepCosts:
    """Seconds of a step of decodes by its number of tokens: a line through the last steps."""

    FADING, MIN_STEPS, UNKNOWN = 0.97, 8, 1 / 16  # the last: a token's price before anything is known

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weights, tokens, tokens^2, seconds, tokens * seconds
        self._count = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        mean = self._sums[3] / self._sums[0] if self._count else seconds
        if seconds > 4 * mean:  # something was recorded, or the machine was busy
            return
        if seconds < mean / 4:  # so it was before
            self._sums, self._count = [0.0] * 5, 0
        new = 1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds
        self._sums = [self.FADING * old + value for old, value in zip(self._sums, new)]
        self._count += 1

    def price(self, num_rows: int, more: float = 0.0) -> float:
        """What a candidate costs, as a share of what an accepted one saves: its share of a step of `num_rows` rows.
        `more` seconds are spent to propose one for each."""
        num_rows = max(num_rows, 1)
        count, x, xx, y, xy = self._sums
        spread = count * xx - x * x
        if self._count < self.MIN_STEPS or spread < 1e-2 * count * count:
            return self.UNKNOWN + (more / num_rows * count / y if y else 0.0)
        slope = min(max((count * xy - x * y) / spread, 0.0), y / x)
        fixed = max(y / count - slope * x / count, 1e-9)
        return (slope + more / num_rows) / (fixed / num_rows + slope)


class DraftLength:
    """How many candidates pay: the `k`-th does while the chance that all of the first `k` are accepted is above its
    price. A row whose candidates are refused, or that finds none, tries again after pauses that double."""

    FADING, FIRST_PAUSE, MAX_PAUSE, MAX_SEARCH = 0.8, 8, 1 << 10, 16

    def __init__(self, most: int) -> None:
        self.most = most
        self.pause = 0  # steps without a proposal from the next on
        self._accepted, self._tried = 1.6, 2.0
        self._refusal, self._search = self.FIRST_PAUSE, 0  # the next pauses

    def choose(self, price: float) -> int:
        """The length of the next draft; 0 for none, and there is a pause."""
        rate = min(self._accepted / self._tried, 0.999)
        length = int(math.log(min(max(price, 1e-6), 0.999)) / math.log(rate)) if rate > 0 else 0
        if not length:
            self.pause, self._refusal = self._refusal, min(2 * self._refusal, self.MAX_PAUSE)
            self._accepted, self._tried = max(self._accepted, 0.5), 1.0  # one candidate is tried then
        return min(length, self.most)

    def find_nothing(self) -> None:
        """There was nothing to propose."""
        self.pause, self._search = self._search, min(2 * self._search + 1, self.MAX_SEARCH)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        self._accepted = self.FADING * self._accepted + num_accepted
        self._tried = self.FADING * self._tried + min(num_accepted + 1, num_proposed)
        if num_accepted:
            self._refusal, self._search = self.FIRST_PAUSE, 0


class NgramIndex:
    """What came behind the last tokens in texts of other rows and of earlier requests, within a namespace: for `NGRAM`
    tokens the next ones, the newest `INDEX_SIZE` of all. Kept as bytes, which no collection of garbage looks at."""

    def __init__(self) -> None:
        self._behind: OrderedDict[bytes, bytes] = OrderedDict()

    def add(self, token_ids: list[int], start: int, end: int, namespace: int = 0) -> None:
        """What stands behind the first `n` of these tokens, for each `n` of a range."""
        packed, size, own = _packed(token_ids), _SIZE, _packed([namespace])
        for at in range(max(start, NGRAM) * size, end * size, size):
            key = own + packed[at - NGRAM * size : at]
            self._behind[key] = packed[at : at + MAX_DRAFT * size]
            self._behind.move_to_end(key)
        while len(self._behind) > INDEX_SIZE:
            self._behind.popitem(last=False)

    def find(self, ngram: list[int], namespace: int = 0) -> list[int]:
        found = self._behind.get(_packed([namespace, *ngram]))
        return [] if found is None else array("q", found).tolist()

    def __len__(self) -> int:
        return len(self._behind)


def _packed(token_ids: list[int]) -> bytes:
    return array("q", token_ids).tobytes()


class Ngrams:
    """Proposes what came behind a row's last tokens before: in its own text, else in others' (`index`). Behind a token
    that was not the candidate, where these tell nothing, it goes on behind the candidate: a copy with another word."""

    def __init__(self, index: NgramIndex, num_prompt_tokens: int, namespace: int = 0) -> None:
        self.index, self.namespace = index, namespace
        self._text = bytearray()  # the row's own tokens, which are searched as bytes: that takes less than a table
        self._num_told = num_prompt_tokens  # tokens that are in `index`, with what is behind them
        self._token_ids: list[int] = []
        self._source: int | None = None  # where the last proposal begins in the row's own text
        self._next: int | None = None  # where the next would, if the row copies
        self._is_guess = False  # whether the last one began there

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        end, found = len(token_ids), list[int]()
        start = self._find(token_ids) if end > NGRAM else None
        if start is None:
            found = self.index.find(token_ids[end - NGRAM :], self.namespace)[:count]
        self._is_guess = start is None and not found and self._next is not None
        if self._is_guess:
            start = self._next
        self._source, self._next = start, None
        if start is not None and start < end:
            found = token_ids[start : start + count]
            if len(found) < count:  # what repeats itself goes on doing so
                found = list(itertools.islice(itertools.cycle(found), count))
        return Draft(found) if found else None

    def _find(self, token_ids: list[int]) -> int | None:
        """Where the last n-gram ended in the text before."""
        text, size = self._text, _SIZE
        text += _packed(token_ids[len(text) // size :])
        self._token_ids = token_ids
        ngram, at = text[-NGRAM * size :], len(text) - size
        while (at := text.rfind(ngram, 0, at)) >= 0:
            if at % size == 0:
                return at // size + NGRAM
            at += len(ngram) - 1  # bytes of two tokens
        return None

    def observe(self, token_ids: list[int], num_accepted: int) -> None:
        if self._source is not None and (num_accepted or not self._is_guess):
            self._next = self._source + num_accepted + 1
        self._token_ids, self._source = token_ids, None
        if len(token_ids) - MAX_DRAFT - self._num_told >= MAX_DRAFT:
            self._tell(len(token_ids) - MAX_DRAFT)

    def _tell(self, end: int) -> None:
        """Others get what stands behind each of the row's new tokens, up to `end`."""
        first = max(0, self._num_told - NGRAM)
        self.index.add(self._token_ids[first:], self._num_told - first, end - first, self.namespace)
        self._num_told = max(self._num_told, end)

    def close(self) -> None:
        self._tell(len(self._token_ids) - 1)


class Generated:
    """Candidates of one of transformers' generators, a row at a time. A row with a seed lets it draw by `draws`."""

    def __init__(
        self, generator: Any, device: torch.device, keeps_scores: bool, draws: torch.Generator | None = None
    ) -> None:
        self.generator, self._device, self._keeps_scores, self._draws = generator, device, keeps_scores, draws
        self._last: tuple[Tensor, int] | None = None

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        ids = torch.tensor([token_ids], dtype=torch.long, device=self._device)
        with self._running():
            found, scores = self.generator.get_candidates(ids)
        tokens = found[0, len(token_ids) :].tolist()[:count]
        self._last = ids, len(tokens)
        if not tokens:
            return None
        if scores is None or not self._keeps_scores:
            return Draft(tokens)
        return Draft(tokens, scores[0, : len(tokens)].float())

    def observe(self, token_ids: list[int], num_accepted: int) -> None:
        if self._last is not None:
            ids, num_proposed = self._last
            # of the scores it reads the number alone
            scores = torch.empty((1, num_proposed + 1, 1), device=ids.device)
            self.generator.update_candidate_strategy(ids, scores, num_accepted)
            self._last = None

    def close(self) -> None:
        self._last = None

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Around the forwards of the generator's model. Early exit takes layers out of its config, which an error or an
        interrupt must not leave so."""
        model = getattr(self.generator, "assistant_model", None)
        if model is None:
            yield
            return
        config = getattr(model.base_model, "config", None)
        num_layers = getattr(config, "num_hidden_layers", None)
        with step_lock(model), contextlib.nullcontext() if self._draws is None else _drawing_by(self._draws):
            try:
                with let_in():
                    yield
            finally:
                if config is not None and num_layers is not None:
                    config.num_hidden_layers = num_layers


@contextlib.contextmanager
def _drawing_by(generator: torch.Generator) -> Iterator[None]:
    """torch's own generator of this device draws what this one would."""
    device: Any = generator.device
    own = torch.random if device.type == "cpu" else torch.get_device_module(device)
    where = () if device.type == "cpu" else (device,)
    before = own.get_rng_state(*where)
    own.set_rng_state(generator.get_state(), *where)
    try:
        yield
    finally:
        generator.set_state(own.get_rng_state(*where))
        own.set_rng_state(before, *where)


@dataclass(eq=False)
class Speculation:
    """A row's source of candidates, and what became of them. Without a `length`, it proposes `most` whenever it can."""

    source: Source
    most: int
    length: DraftLength | None
    generator: torch.Generator | None = None
    draft: Draft | None = field(default=None, init=False)
    wake_at: int = field(default=0, init=False)  # the step from which on it proposes again
    num_proposed: int = field(default=0, init=False)
    num_accepted: int = field(default=0, init=False)
    num_drafts: int = field(default=0, init=False)

    def num_wanted(self, price: float, step: int) -> int:
        """How many tokens to propose in this step, by its number."""
        if self.length is None:
            return self.most
        count = self.length.choose(price)
        if not count:
            self.wake_at = step + self.length.pause + 1
        return count

    def take(self, draft: Draft | None, step: int) -> list[int]:
        """The tokens of what was proposed for the next step, by its number."""
        self.draft = draft
        if draft is None or not draft.tokens:
            self.draft = None
            if self.length is not None:
                self.length.find_nothing()
                self.wake_at = step + self.length.pause + 1
            return []
        if draft.scores is not None:
            device = draft.scores.device if self.generator is None else self.generator.device
            draft.levels = torch.rand(len(draft.drawn), generator=self.generator, device=device)
        return draft.tokens

    def observe(self, token_ids: list[int], num_proposed: int, num_accepted: int) -> None:
        """The step is over: of its candidates, as many as were computed, some were accepted."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self.num_drafts += num_proposed > 0
        if self.length is not None and num_proposed:
            self.length.observe(num_proposed, num_accepted)
        self.source.observe(token_ids, num_accepted)
        self.draft = None
