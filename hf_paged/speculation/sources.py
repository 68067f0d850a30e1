"""Sources of drafts for a row's next tokens, which one forward verifies (speculative decoding,
arXiv 2211.17192; prompt lookup; transformers' candidate generators), and the draft length that pays
off at the row's acceptance rate. Leaves verifying to the sampler, which gives a row the tokens that
it would get without drafts: it samples the step's logits as usual, position after position, as long
as the chosen token is the draft's."""

from __future__ import annotations

import contextlib
import itertools
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..batching.decoding.base import Draft
from ..batching.decoding.scores import draw
from ..interrupts import restoring
from ..threads import step_lock

NGRAM = 3  # tokens of an n-gram
MAX_DRAFT = 16  # most tokens of an n-gram draft
INDEX_SIZE = 1 << 16  # number of n-grams in the index
_SIZE = array("q").itemsize  # bytes of a token


class DrawnDraft(Draft):
    """A draft whose `n` tokens were drawn from the logits `scores` `(n, vocab)`. Sampled rows
    accept its tokens as in algorithm 1 of the paper."""

    is_drawn = True
    uniforms: Tensor  # the algorithm's uniform random numbers, drawn in advance

    def __init__(self, tokens: list[int], scores: Tensor) -> None:
        super().__init__(tokens)
        # the whole draft: `sample` may also accept the first token that is not verified
        self.drawn = list(tokens)
        self.scores = scores

    def sample(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns the next token `(1,)` for `(1, vocab)` probabilities: the draft's, or one drawn
        from the residual distribution."""
        position = self.position
        if position < len(self.drawn):
            token = self.drawn[position]
            proposed = self.scores[position : position + 1].softmax(dim=-1)
            ratio = probs[0, token] / proposed[0, token]
            if bool(self.uniforms[position] <= ratio):
                return torch.tensor([token], device=probs.device)
            residual = (probs - proposed).clamp(min=0)
            mass = residual.sum()
            if float(mass) > 0:  # zero if both are equal up to rounding
                probs = residual / mass
        return draw(probs, generator)


class Source:
    """The source of one row's drafts. An `assistant` drafts for all of its rows together. Without
    `length`, drafts are as long as the source allows."""

    assistant: Any = None  # an `Assistant`
    limit = MAX_DRAFT  # most tokens of a draft, without an `assistant`
    strategy: Any = None  # transformers' candidate generator, which learns from its drafts
    num_proposed = 0  # tokens of its last draft
    length: DraftLength | None = None
    generator: torch.Generator | None = None  # the row's
    wake_at = 0  # the first step in which it drafts again

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        """Returns up to `count` tokens to follow `token_ids`, or `None`."""
        raise NotImplementedError

    def observe(self, token_ids: list[int], num_accepted: int) -> None:
        """Records that `num_accepted` tokens of the last draft were accepted. `token_ids`: the
        row's current tokens."""
        if self.num_proposed:
            # the strategy reads only the number of scores
            scores = torch.empty((1, self.num_proposed + 1, 1), device="cpu")
            self.strategy.update_candidate_strategy(None, scores, num_accepted)
        self.num_proposed = 0

    def close(self) -> None:
        """Ends the row."""
        return None

    def num_to_draft(self, price: float, max_tokens: int, step: int) -> int:
        """Returns how many tokens, at most `max_tokens`, to draft in step number `step`."""
        if self.length is None:
            return max_tokens
        count = self.length.choose(price, max_tokens)
        if not count:
            self.wake_at = step + self.length.pause + 1
        return count

    def prepare(self, draft: Draft | None, step: int, num_embeddings: int) -> Draft | None:
        """Cuts the draft for step number `step` at the first token for which the model has no
        embedding, as an assistant may draft. Returns `None` if the draft is empty."""
        if draft is not None:
            for position, token in enumerate(draft.tokens):
                if token >= num_embeddings:
                    del draft.tokens[position:]
                    if isinstance(draft, DrawnDraft):
                        del draft.drawn[position:]
                    break
        if draft is None or not draft.tokens:
            if self.length is not None:
                self.length.observe_no_draft()
                self.wake_at = step + self.length.pause + 1
            return None
        if isinstance(draft, DrawnDraft):
            device = draft.scores.device
            if self.generator is not None:
                device = self.generator.device
            draft.uniforms = torch.rand(len(draft.drawn), generator=self.generator, device=device)
        return draft


class StepCosts:
    """Fits a line to the seconds of the last decode steps, by their numbers of tokens."""

    # `UNKNOWN`: a token's price before there are enough observations
    FADING = 0.97
    MIN_STEPS = 8
    UNKNOWN = 1 / 16

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weights, tokens, tokens^2, seconds, tokens * seconds
        self._count = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        mean = self._sums[3] / self._sums[0] if self._count else seconds
        if seconds > 4 * mean:  # an outlier: a graph was recorded, or the machine was busy
            return
        new = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        if seconds < mean / 4:  # the earlier steps were outliers
            self._sums, self._count = [0.0] * 5, 0
        self._sums = [self.FADING * old + value for old, value in zip(self._sums, new)]
        self._count += 1

    def price(self, num_rows: int, more: float = 0.0) -> float:
        """Returns the cost of a draft token in a step of `num_rows` rows, as a fraction of the time
        that an accepted token saves. Drafting one token for every row takes `more` seconds."""
        num_rows = max(num_rows, 1)
        more /= num_rows
        count, x, xx, y, xy = self._sums
        spread = count * xx - x * x
        if self._count < self.MIN_STEPS or spread < 1e-2 * count * count:
            return self.UNKNOWN + (more * count / y if y else 0)
        fitted = (count * xy - x * y) / spread
        slope = min(max(fitted, 0.0), y / x)
        fixed = max(y / count - slope * x / count, 1e-9)
        return (slope + more) / (fixed / num_rows + slope)


class DraftLength:
    """Chooses draft lengths: the `k`-th token pays off while the probability that the first `k`
    tokens are all accepted is above its price. A row pauses when its drafts are rejected or its
    source has none, every time for twice as long."""

    FADING = 0.8
    FIRST_PAUSE = 8
    MAX_PAUSE = 1 << 10
    MAX_SEARCH = 16

    def __init__(self) -> None:
        self.pause = 0  # number of the next steps without a draft
        self._accepted = 1.6
        self._tried = 2.0
        self._reject_pause, self._empty_pause = self.FIRST_PAUSE, 0  # the next pauses

    def choose(self, price: float, max_tokens: int) -> int:
        """Returns the length of the next draft, at most `max_tokens`; 0 begins a pause."""
        rate = min(self._accepted / self._tried, 0.999)
        length = 0
        if rate > 0:
            length = int(math.log(min(max(price, 1e-6), 0.999)) / math.log(rate))
        if not length:
            self.pause = self._reject_pause
            self._reject_pause = min(2 * self._reject_pause, self.MAX_PAUSE)
            # after the pause, try one token
            self._accepted, self._tried = max(self._accepted, 0.5), 1.0
        return min(length, max_tokens)

    def observe_no_draft(self) -> None:
        """Begins a pause because the source had no draft."""
        self.pause = self._empty_pause
        self._empty_pause = min(2 * self._empty_pause + 1, self.MAX_SEARCH)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        self._accepted = self.FADING * self._accepted + num_accepted
        self._tried = self.FADING * self._tried + min(num_accepted + 1, num_proposed)
        if num_accepted:
            self._reject_pause, self._empty_pause = self.FIRST_PAUSE, 0


class NgramIndex:
    """Maps n-grams of `NGRAM` tokens to the tokens that followed them in other rows and earlier
    requests of the same namespace (its digest). Stores the latest `INDEX_SIZE` n-grams, as bytes,
    which the garbage collector does not traverse."""

    def __init__(self) -> None:
        self._continuations: OrderedDict[bytes, bytes] = OrderedDict()

    def add(
        self,
        token_ids: list[int],
        start: int,
        end: int,
        namespace: bytes = b"",
    ) -> None:
        """Adds the tokens that follow the first `n` of `token_ids`, for each `n` in `range(start,
        end)`."""
        packed = _packed(token_ids)
        for number in range(max(start, NGRAM), end):
            end_byte = number * _SIZE
            key = namespace + packed[end_byte - NGRAM * _SIZE : end_byte]
            self._continuations[key] = packed[end_byte : end_byte + MAX_DRAFT * _SIZE]
            self._continuations.move_to_end(key)
        while len(self._continuations) > INDEX_SIZE:
            self._continuations.popitem(last=False)

    def find(
        self,
        ngram: list[int],
        namespace: bytes = b"",
    ) -> list[int]:
        continuation = self._continuations.get(namespace + _packed(ngram), b"")
        return array("q", continuation).tolist()


def _packed(token_ids: list[int]) -> bytes:
    return array("q", token_ids).tobytes()


class Ngrams(Source):
    """Drafts the tokens that followed an earlier occurrence of the row's last n-gram, in the row's
    own text or else in other rows (`index`). If a token was rejected and neither has the n-gram,
    continues after that position in the copied text: only one word may differ."""

    def __init__(self, index: NgramIndex, num_prompt_tokens: int, namespace: bytes = b"") -> None:
        self.index = index
        self.namespace = namespace
        self._text = bytearray()  # the row's tokens; searching bytes is cheaper than a table
        # number of tokens whose continuations are in `index`
        self._num_indexed = num_prompt_tokens
        self._token_ids: list[int] = []
        self._source: int | None = None  # position of the last draft in the row's text
        self._next: int | None = None  # position of the next draft if the row continues to copy
        self._is_continuation = False  # whether the last draft was taken from `_next`

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        end = len(token_ids)
        tokens = list[int]()
        start = self._find(token_ids) if end > NGRAM else None
        if start is None:
            tokens = self.index.find(token_ids[end - NGRAM :], self.namespace)[:count]
        self._is_continuation = start is None and not tokens and self._next is not None
        if self._is_continuation:
            start = self._next
        self._source, self._next = start, None
        if start is not None and start < end:
            tokens = token_ids[start : start + count]
            if len(tokens) < count:  # the text repeats itself: draft further repetitions
                tokens = list(itertools.islice(itertools.cycle(tokens), count))
        return Draft(tokens) if tokens else None

    def _find(self, token_ids: list[int]) -> int | None:
        """Returns the end of the latest earlier occurrence of the row's last n-gram, or `None`."""
        text = self._text
        text += _packed(token_ids[len(text) // _SIZE :])
        self._token_ids = token_ids
        ngram = text[-NGRAM * _SIZE :]
        at = len(text) - _SIZE
        while (at := text.rfind(ngram, 0, at)) >= 0:
            if at % _SIZE == 0:
                return at // _SIZE + NGRAM
            at += len(ngram) - 1  # the match crosses token boundaries: keep searching
        return None

    def observe(self, token_ids: list[int], num_accepted: int) -> None:
        end = len(token_ids) - MAX_DRAFT
        if self._source is not None and (num_accepted or not self._is_continuation):
            self._next = self._source + num_accepted + 1
        self._token_ids, self._source = token_ids, None
        if end - self._num_indexed >= MAX_DRAFT:
            self._add_to_index(end)

    def _add_to_index(self, end: int) -> None:
        """Adds the continuations of the row's new tokens, up to `end`, to the index."""
        first = max(0, self._num_indexed - NGRAM)
        tokens = self._token_ids[first:]
        self.index.add(tokens, self._num_indexed - first, end - first, self.namespace)
        self._num_indexed = max(self._num_indexed, end)

    def close(self) -> None:
        self._add_to_index(len(self._token_ids) - 1)


class Generated(Source):
    """Drafts up to `limit` tokens for one row from one of transformers' candidate generators. For a
    sampled row (`draws`) with a seed, draws them from the row's generator."""

    def __init__(
        self,
        strategy: Any,
        limit: int,
        device: torch.device,
        draws: bool,
    ) -> None:
        self.strategy = strategy
        self.limit = limit
        self._device = device
        self._draws = draws

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        ids = torch.tensor([token_ids], dtype=torch.long, device=self._device)
        with self._running():
            candidates, scores = self.strategy.get_candidates(ids)
        tokens = candidates[0, len(token_ids) :].tolist()[:count]
        self.num_proposed = len(tokens)
        if not tokens:
            return None
        if scores is None or not self._draws:
            return Draft(tokens)
        return DrawnDraft(tokens, scores[0, : len(tokens)].float())

    @restoring
    def _running(self) -> Iterator[None]:
        """Wraps forwards of the generator's model. Early exit lowers `num_hidden_layers` in the
        model's config; this restores it even after an error or an interrupt."""
        model = getattr(self.strategy, "assistant_model", None)
        if model is None:
            yield
            return
        config = getattr(model.base_model, "config", None)
        num_layers = getattr(config, "num_hidden_layers", None)
        drawing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._draws and self.generator is not None:
            drawing = _drawing_by(self.generator)
        with step_lock(model), drawing:
            try:
                yield
            finally:
                if config is not None and num_layers is not None:
                    config.num_hidden_layers = num_layers


@restoring
def _drawing_by(generator: torch.Generator) -> Iterator[None]:
    """Makes torch's global generator of the device draw as `generator` would, which advances
    instead of it."""
    device: Any = generator.device
    module: Any = torch.random
    where: tuple[Any, ...] = ()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        where = (device,)
    before = module.get_rng_state(*where)
    module.set_rng_state(generator.get_state(), *where)
    try:
        yield
    finally:
        generator.set_state(module.get_rng_state(*where))
        module.set_rng_state(before, *where)
