"""Sources of drafts: n-grams of earlier text (prompt lookup), and transformers' candidate
generators. A draft guesses a row's next tokens, which one forward verifies (speculative decoding,
arXiv 2211.17192). `DraftLength` chooses the length that pays off at the row's acceptance rate.

The sampler verifies drafts: it samples the step's logits as usual, position after position, until a
token differs from the draft, so a row gets the same tokens as without drafts. For drawn drafts
(`DrawnDraft`), sampled rows use speculative sampling, which keeps the distribution of their tokens
but not the tokens."""

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

NGRAM_SIZE = 3  # tokens
MAX_DRAFT_TOKENS = 16  # of n-gram drafts
MAX_INDEX_NGRAMS = 1 << 16
_TOKEN_BYTES = array("q").itemsize


class DrawnDraft(Draft):
    """A draft whose `n` tokens were drawn from the logits `scores` `(n, vocab)`, which are on the
    target's device. Sampled rows accept its tokens by algorithm 1 of arXiv 2211.17192."""

    is_drawn = True
    uniforms: Tensor  # the algorithm's uniform random numbers, one per token, drawn in advance

    def __init__(self, tokens: list[int], scores: Tensor) -> None:
        super().__init__(tokens)
        # includes tokens cut from `tokens`: `sample` may accept the one after the verified tokens
        self.drawn_tokens = list(tokens)
        self.scores = scores

    def draw_uniforms(self, generator: torch.Generator | None) -> None:
        """Draws `uniforms`, on the device of the generator or, without one, of `scores`."""
        device = self.scores.device if generator is None else generator.device
        count = len(self.drawn_tokens)
        self.uniforms = torch.rand(count, generator=generator, dtype=torch.float32, device=device)

    def sample(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns the next token `(1,)` for `(1, vocab)` probabilities: the draft's, if accepted;
        otherwise one drawn from the residual distribution or, after the draft, from `probs`."""
        position = self.position
        if position < len(self.drawn_tokens):
            token = self.drawn_tokens[position]
            draft_probs = self.scores[position : position + 1].softmax(dim=-1)
            ratio = probs[0, token] / draft_probs[0, token]
            if bool(self.uniforms[position] <= ratio):
                return torch.tensor([token], device=probs.device)
            residual = (probs - draft_probs).clamp(min=0)
            mass = residual.sum()
            if float(mass) > 0:  # 0 if both distributions are equal up to rounding
                probs = residual / mass
        return draw(probs, generator)


class Source:
    """The source of one row's drafts. An `assistant` drafts for all of its rows together; without
    one, `propose` drafts. Without `adaptive_length`, drafts are as long as the source allows."""

    assistant: Any = None  # an `Assistant`
    max_tokens = MAX_DRAFT_TOKENS  # of a draft, without an `assistant`
    strategy: Any = None  # transformers' candidate generator; adapts its draft lengths
    num_proposed = 0  # number of tokens in the last draft of `strategy`; 0 after `observe`
    adaptive_length: DraftLength | None = None
    generator: torch.Generator | None = None  # the row's; `None`: torch's global one
    resume_step = 0  # the first step after a pause

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        """Returns a draft of up to `count` tokens to follow `token_ids`, or `None`."""
        raise NotImplementedError

    def observe(self, token_ids: list[int], num_accepted: int) -> None:
        """Records that `num_accepted` tokens of the last draft were accepted. `token_ids`: the
        row's current tokens."""
        if self.num_proposed:
            # the strategy reads only the shape of the scores
            scores = torch.empty((1, self.num_proposed + 1, 1), device="cpu")
            self.strategy.update_candidate_strategy(None, scores, num_accepted)
        self.num_proposed = 0

    def close(self) -> None:
        """Ends the row."""
        return None

    def num_to_draft(self, price: float, max_tokens: int, step: int) -> int:
        """Returns how many tokens to draft in step number `step`, given the `StepCosts.price`: at
        most `max_tokens`, which is at least 1. If the number is 0, begins a pause."""
        if self.adaptive_length is None:
            return max_tokens
        count = self.adaptive_length.choose(price, max_tokens)
        if not count:
            self.resume_step = step + self.adaptive_length.pause + 1
        return count

    def prepare(self, draft: Draft | None, step: int, num_embeddings: int) -> Draft | None:
        """Makes a draft ready for step number `step`: cuts it before the first token that has no
        embedding in the model (an assistant's vocabulary may be larger), and draws its random
        numbers. If no token is left, begins a pause if there is an `adaptive_length`, and returns
        `None`."""
        if draft is not None:
            for position, token in enumerate(draft.tokens):
                if token >= num_embeddings:
                    del draft.tokens[position:]
                    if isinstance(draft, DrawnDraft):
                        del draft.drawn_tokens[position:]
                    break
        if draft is None or not draft.tokens:
            if self.adaptive_length is not None:
                self.adaptive_length.observe_no_draft()
                self.resume_step = step + self.adaptive_length.pause + 1
            return None
        if isinstance(draft, DrawnDraft):
            draft.draw_uniforms(self.generator)
        return draft


class StepCosts:
    """Fits a line to the seconds of recent decode steps as a function of the steps' token
    counts."""

    DECAY = 0.97  # of a step's weight, per later step
    MIN_STEPS = 8  # with fewer, `DEFAULT_PRICE` replaces the fitted price
    DEFAULT_PRICE = 1 / 16

    def __init__(self) -> None:
        # weighted sums over steps, of: 1, tokens, tokens^2, seconds, tokens * seconds
        self._sums = [0.0] * 5
        self._num_steps = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Adds a step, unless it took more than 4 times the mean time of earlier steps. If it took
        less than a quarter of the mean, drops the earlier steps."""
        mean = self._sums[3] / self._sums[0] if self._num_steps else seconds
        if seconds > 4 * mean:  # perhaps a graph was recorded, or the machine was busy
            return
        terms = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        if seconds < mean / 4:  # the earlier steps were outliers
            self._sums, self._num_steps = [0.0] * 5, 0
        self._sums = [self.DECAY * total + term for total, term in zip(self._sums, terms)]
        self._num_steps += 1

    def price(self, num_rows: int, draft_seconds: float = 0.0) -> float:
        """Returns the cost of a draft token in a step of `num_rows` rows, as a fraction of the time
        that an accepted token saves. `draft_seconds`: the time to draft one token for all rows."""
        weight, tokens, squares, seconds, products = self._sums
        spread = weight * squares - tokens * tokens
        if self._num_steps < self.MIN_STEPS or spread < 1e-2 * weight * weight:
            relative_cost = draft_seconds * weight / seconds if seconds else 0
            return self.DEFAULT_PRICE + relative_cost
        fitted_slope = (weight * products - tokens * seconds) / spread
        slope = min(max(fitted_slope, 0.0), seconds / tokens)  # seconds per token
        fixed_seconds = max(seconds / weight - slope * tokens / weight, 1e-9)  # seconds per step
        num_rows = max(num_rows, 1)
        return (slope + draft_seconds / num_rows) / (fixed_seconds / num_rows + slope)


class DraftLength:
    """Chooses the lengths of a row's drafts: the `k`-th token pays off while the probability that
    the first `k` tokens are all accepted exceeds `StepCosts.price`. A row pauses when not even one
    token pays off, or when its source has no draft. Pauses grow, up to a maximum, until a token is
    accepted."""

    DECAY = 0.8  # of a draft's weight in the acceptance rate, per later draft
    FIRST_PAUSE = 8  # pauses are in steps
    MAX_PAUSE = 1 << 10
    MAX_EMPTY_PAUSE = 16

    def __init__(self) -> None:
        self.pause = 0  # steps without a draft from now on
        # weighted numbers of draft tokens
        self._num_accepted = 1.6
        self._num_verified = 2.0  # accepted or rejected
        self._reject_pause = self.FIRST_PAUSE  # the next pause after rejections
        self._empty_pause = 0  # the next pause if the source has no draft

    def choose(self, price: float, max_tokens: int) -> int:
        """Returns the length of the next draft, up to `max_tokens`; if it is 0, begins a pause."""
        rate = min(self._num_accepted / self._num_verified, 0.999)
        length = 0
        if rate > 0:
            length = int(math.log(min(max(price, 1e-6), 0.999)) / math.log(rate))
        if not length:
            self.pause = self._reject_pause
            self._reject_pause = min(2 * self._reject_pause, self.MAX_PAUSE)
            # an acceptance rate of at least a half, so that drafts may be tried after the pause
            self._num_accepted, self._num_verified = max(rate, 0.5), 1.0
        return min(length, max_tokens)

    def observe_no_draft(self) -> None:
        """Begins a pause, since the source had no draft. The first such pause has 0 steps."""
        self.pause = self._empty_pause
        self._empty_pause = min(2 * self._empty_pause + 1, self.MAX_EMPTY_PAUSE)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Updates the acceptance rate after a draft of `num_proposed` tokens."""
        num_verified = min(num_accepted + 1, num_proposed)
        self._num_accepted = self.DECAY * self._num_accepted + num_accepted
        self._num_verified = self.DECAY * self._num_verified + num_verified
        if num_accepted:
            self._reject_pause, self._empty_pause = self.FIRST_PAUSE, 0


class NgramIndex:
    """Maps n-grams of `NGRAM_SIZE` tokens to the tokens that followed them in texts generated by
    current and earlier requests, by namespace. Keeps the latest `MAX_INDEX_NGRAMS` of all
    namespaces together, as bytes, which the garbage collector does not traverse."""

    def __init__(self) -> None:
        self._continuations: OrderedDict[bytes, bytes] = OrderedDict()

    def add(
        self,
        token_ids: list[int],
        start: int,
        end: int,
        namespace: bytes = b"",
    ) -> None:
        """For each `n` in `range(start, end)` that is at least `NGRAM_SIZE`, maps the n-gram at the
        end of `token_ids[:n]` to the tokens that follow it, up to `MAX_DRAFT_TOKENS`. `namespace`:
        a digest."""
        packed = _to_bytes(token_ids)
        for num_tokens in range(max(start, NGRAM_SIZE), end):
            end_byte = num_tokens * _TOKEN_BYTES
            key = namespace + packed[end_byte - NGRAM_SIZE * _TOKEN_BYTES : end_byte]
            self._continuations[key] = packed[end_byte : end_byte + MAX_DRAFT_TOKENS * _TOKEN_BYTES]
            self._continuations.move_to_end(key)
        while len(self._continuations) > MAX_INDEX_NGRAMS:
            self._continuations.popitem(last=False)

    def find(
        self,
        ngram: list[int],
        namespace: bytes = b"",
    ) -> list[int]:
        """Returns the tokens that followed an n-gram; none if the n-gram is not in the index."""
        continuation = self._continuations.get(namespace + _to_bytes(ngram), b"")
        return array("q", continuation).tolist()


def _to_bytes(token_ids: list[int]) -> bytes:
    return array("q", token_ids).tobytes()


class NgramSource(Source):
    """Drafts the tokens that followed an earlier occurrence of the row's last n-gram: in the row's
    own text or, if there is none, in `index`. If both lack the n-gram because a draft token was
    rejected, continues to copy the same text after that token, since the rest may still match."""

    def __init__(self, index: NgramIndex, num_prompt_tokens: int, namespace: bytes = b"") -> None:
        self.index = index
        self.namespace = namespace
        # the row's tokens, as bytes: searching these is cheaper than maintaining a table of n-grams
        self._text = bytearray()
        # tokens whose continuations are in `index`; the prompt's tokens are not added
        self._num_indexed = num_prompt_tokens
        self._token_ids: list[int] = []
        # position in the row's text from which the last draft was copied
        self._copy_start: int | None = None
        # position from which the next draft is copied if the text and `index` lack the last n-gram
        self._next_copy_start: int | None = None
        self._is_continuation = False  # whether the last draft began at `_next_copy_start`

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        end = len(token_ids)
        tokens = list[int]()
        start = self._find(token_ids) if end > NGRAM_SIZE else None
        if start is None:
            tokens = self.index.find(token_ids[end - NGRAM_SIZE :], self.namespace)[:count]
        self._is_continuation = start is None and not tokens and self._next_copy_start is not None
        if self._is_continuation:
            start = self._next_copy_start
        self._copy_start, self._next_copy_start = start, None
        if start is not None and start < end:
            tokens = token_ids[start : start + count]
            if len(tokens) < count:  # the copy reaches the text's end: repeat it
                tokens = list(itertools.islice(itertools.cycle(tokens), count))
        return Draft(tokens) if tokens else None

    def _find(self, token_ids: list[int]) -> int | None:
        """Returns the position after the latest earlier occurrence of the row's last n-gram, or
        `None`."""
        text = self._text
        text += _to_bytes(token_ids[len(text) // _TOKEN_BYTES :])
        self._token_ids = token_ids
        ngram = text[-NGRAM_SIZE * _TOKEN_BYTES :]
        byte = len(text) - _TOKEN_BYTES
        while (byte := text.rfind(ngram, 0, byte)) >= 0:
            if byte % _TOKEN_BYTES == 0:
                return byte // _TOKEN_BYTES + NGRAM_SIZE
            byte += len(ngram) - 1  # the match crosses token boundaries: continue before it
        return None

    def observe(self, token_ids: list[int], num_accepted: int) -> None:
        end = len(token_ids) - MAX_DRAFT_TOKENS
        if self._copy_start is not None and (num_accepted or not self._is_continuation):
            self._next_copy_start = self._copy_start + num_accepted + 1
        self._token_ids, self._copy_start = token_ids, None
        if end - self._num_indexed >= MAX_DRAFT_TOKENS:
            self._add_to_index(end)

    def _add_to_index(self, end: int) -> None:
        """Adds to the index each n-gram of the row that ends before position `end`, with the tokens
        that followed it. Skips n-grams that it has added before."""
        first = max(0, self._num_indexed - NGRAM_SIZE)
        tokens = self._token_ids[first:]
        self.index.add(tokens, self._num_indexed - first, end - first, self.namespace)
        self._num_indexed = max(self._num_indexed, end)

    def close(self) -> None:
        self._add_to_index(len(self._token_ids) - 1)


class CandidateSource(Source):
    """Drafts up to `max_tokens` tokens for one row with one of transformers' candidate generators.
    If `is_sampled` and the row has a `generator`, tokens are drawn with that generator."""

    def __init__(
        self,
        strategy: Any,
        max_tokens: int,
        device: torch.device,
        is_sampled: bool,
        generator: torch.Generator | None,
    ) -> None:
        self.strategy = strategy
        self.max_tokens = max_tokens
        self._device = device
        self._is_sampled = is_sampled
        self.generator = generator

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        ids = torch.tensor([token_ids], dtype=torch.long, device=self._device)
        with self._forward_context():
            candidates, scores = self.strategy.get_candidates(ids)
        tokens = candidates[0, len(token_ids) :].tolist()[:count]
        self.num_proposed = len(tokens)
        if not tokens:
            return None
        if scores is None or not self._is_sampled:
            return Draft(tokens)
        return DrawnDraft(tokens, scores[0, : len(tokens)].to(self._device, torch.float))

    @restoring
    def _forward_context(self) -> Iterator[None]:
        """A context for forwards of the candidate generator's model. Restores `num_hidden_layers`
        of the model's config, which early exit lowers, even after an error or an interrupt."""
        model = getattr(self.strategy, "assistant_model", None)
        if model is None:
            yield
            return
        config = getattr(model.base_model, "config", None)
        num_layers = getattr(config, "num_hidden_layers", None)
        drawing_context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._is_sampled and self.generator is not None:
            drawing_context = _drawing_by(self.generator)
        with step_lock(model), drawing_context:
            try:
                yield
            finally:
                if config is not None and num_layers is not None:
                    config.num_hidden_layers = num_layers


@restoring
def _drawing_by(generator: torch.Generator) -> Iterator[None]:
    """A context in which draws from torch's global generator of `generator.device` return the
    numbers of `generator`, and advance `generator` instead of the global one."""
    device: Any = generator.device
    module: Any = torch.random
    device_args: tuple[Any, ...] = ()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        device_args = (device,)
    saved_state = module.get_rng_state(*device_args)
    module.set_rng_state(generator.get_state(), *device_args)
    try:
        yield
    finally:
        generator.set_state(module.get_rng_state(*device_args))
        module.set_rng_state(saved_state, *device_args)
