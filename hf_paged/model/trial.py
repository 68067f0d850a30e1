"""Runs short forwards of a model, both plain forwards and an engine's steps, and compares their
logits. `checks` decides what to compare, and which layouts the model supports."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from .. import compat
from ..attention.switch import compiled_modules, switch_attention
from ..cache.block_manager import BlockManager
from ..cache.free_memory import is_out_of_memory
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.paged_cache import PagedCache
from ..cache.sequence_blocks import NO_BLOCKS, UNCACHED, SequenceBlocks
from ..compiled import running_eagerly
from ..config import PagedConfig
from ..interrupts import ensure_done, is_interrupt, restoring
from ..plan import StepPlan
from ..switches import NOTHING
from ..threads import step_lock
from ..topics import Topic
from .forwards import compute_device, num_embeddings
from .layout import Layout
from .own_loop import cache_parts, first_inputs, next_logits, tensors_of
from .writes import Snapshot, Write

# Makes a block manager and a runner (`execution.runner.Runner`) on the memory of an empty cache.
MakeRunner = Callable[[PreTrainedModel, PagedCache, Layout], tuple[BlockManager, Any]]
Step = tuple[tuple[int, int], ...]  # for each row, its index and the number of tokens to compute

# Tolerances, in standard deviations of the logits. In half precision, rounding depends on shapes,
# and changes logits by about a fifth of the tolerance. A router may then choose another expert for
# a token or two, so in half precision the tolerance limits the median over tokens, not the maximum.
TOLERANCE = 1e-3
HALF_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
# For each value of torch's `fp32_precision`, which lowers the precision of float32 products: the
# half-precision dtype with as many mantissa bits as the operands keep.
_PRODUCT_DTYPES = {"tf32": torch.float16, "bf16": torch.bfloat16}

# the default block size, so that on a GPU, checks and calls share compiled kernels
CONFIG = PagedConfig(block_size=16, kv_dtype=None, storage="blocks")
# Makes a separate memory for a check, since the model's own may be full. `hf_paged.budget` does not
# limit it: if a check ran out of budget, its verdict would be that the model cannot be packed.
scratch_memory = functools.partial(PagedMemory, CONFIG, is_bounded=False)

LENGTH = 22
"""Tokens of each of the three sequences: more than a block has, and more than the sliding windows
of the tests' models."""


class ForwardFailedError(Exception):
    """A check's forward failed, drew random numbers or made writes that cannot be undone. If the
    error `is_permanent`, later checks would also fail."""

    is_permanent = False


class WritesLostError(ForwardFailedError):
    """A forward's writes cannot be undone."""

    is_permanent = True


def first_line(error: BaseException) -> str:
    """The first line of an error's message; if it is empty, the name of the error's type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@dataclasses.dataclass
class Trial:
    """A model that is being checked."""

    model: PreTrainedModel
    cache: PagedCache  # built for the model; stays empty
    make_runner: MakeRunner
    prompts: Any = None  # `execution.prompts.Prompts`, if the check is of a call's prompts
    writes: list[Write] = dataclasses.field(default_factory=list)  # by its forwards

    def __post_init__(self) -> None:
        dtype = autocast_dtype(compute_device(self.model))
        # dtypes in which logits are computed; `decode` adds the dtypes of cached tensors, since a
        # model may turn on autocast itself
        self.dtypes = {self.model.dtype, dtype}

    @restoring
    def forwards(self, by_engine: bool = False) -> Iterator[None]:
        """A context for forwards. When it ends, it adds their writes into modules to `writes`,
        undoes them, and restores the random state. As in an engine's steps, layers with a cache do
        not run compiled code. `by_engine`: whether the forwards are an engine's, which call our
        attention; otherwise they are plain. Raises `ForwardFailedError` if a forward raises
        anything but an interrupt or an out-of-memory error, draws random numbers, or makes writes
        that cannot be undone."""
        model = self.model
        device = compute_device(model)
        devices = [] if device.type in ("cpu", "meta") else [device]
        modules = list(model.modules())
        attention = switch_attention(modules) if by_engine else NOTHING
        with (
            torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
            torch.no_grad(),
            running_eagerly(compiled_modules(modules)),
            attention,
        ):
            snapshot = Snapshot(model)
            random_states = _random_states(devices)
            try:
                yield
            except Exception as error:
                if is_interrupt(error) or is_out_of_memory(error):
                    raise
                raise ForwardFailedError(f"its forward fails: {first_line(error)}") from error
            else:
                has_same_states = all(map(torch.equal, random_states, _random_states(devices)))
                if snapshot.has_drawn or not has_same_states:
                    # rows of one prompt would share these numbers
                    raise ForwardFailedError("its forward draws random numbers")
            finally:
                ensure_done(functools.partial(snapshot.restore, by_engine, self.writes))
            num_bytes = snapshot.num_lost_bytes
            if num_bytes:
                raise WritesLostError(
                    f"its forward writes to {num_bytes} bytes of buffers, too many to copy"
                )

    def decode(
        self,
        ids: Tensor,
        inputs: dict[str, Any],
        new_tokens: Tensor,
        make_context: Callable[[int], AbstractContextManager[Any]] = lambda length: NOTHING,
        later_inputs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Returns the logits `(1 + n, rows, vocab_size)` of plain forwards: after `ids` `(rows,
        length)`, and after each of the `new_tokens` `(rows or 1, n)` that follow. The forward that
        ends after `length` tokens runs in the context `make_context(length)`. Every forward but the
        first gets `later_inputs` in place of the `inputs` of these names. Adds the dtypes of the
        cached tensors to `dtypes`."""
        model = self.model
        cache: Any = stock_cache(model)
        if model.config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, stock_cache(model))
        if compat.supports_dynamic_cache(model):
            inputs = {**inputs, compat.cache_name(model): cache}
        new_tokens = new_tokens.expand(len(ids), -1)
        logits = []
        for count in range(new_tokens.shape[1] + 1):
            tokens = torch.cat([ids, new_tokens[:, :count]], dim=1)
            with make_context(tokens.shape[1]):
                step_logits, inputs = next_logits(model, tokens, inputs, is_first_step=not count)
            inputs = {**inputs, **(later_inputs or {})}
            logits.append(step_logits)
        cached_attributes = [vars(layer) for part in cache_parts(cache) for layer in part.layers]
        self.dtypes |= {x.dtype for x in tensors_of(cached_attributes) if x.is_floating_point()}
        return torch.stack(logits)

    def decode_rows(self, rows: Tensor, prompt_length: int, padding: int = 0) -> Tensor:
        """Returns the logits of `decode` for token ids `rows` `(rows, length)`: after the first
        `prompt_length` tokens, and after each later token. The first `padding` tokens are
        masked."""
        ids = rows[:, :prompt_length]
        mask = torch.ones_like(ids)
        mask[:, :padding] = 0
        inputs = first_inputs(self.model, ids, mask, None)
        return self.decode(ids, inputs, rows[:, prompt_length:])

    def run(
        self,
        layout: Layout,
        tokens: Tensor,
        prompt_lengths: Sequence[int],
        steps: Iterable[Step],
        memory: PagedMemory | None = None,
    ) -> Tensor:
        """Runs `steps` of rows with these `tokens` `(rows, length)`, which begin with prompts of
        these `prompt_lengths`, in `memory` or in a new one. Returns the logits `(n, vocab_size)` of
        all steps. A step returns no logits for a row whose prompt it does not finish."""
        with self.forwards(by_engine=True):
            runner = TrialRunner(self, layout, memory)
            rows = list[TrialRow]()
            for token_ids, prompt_length in zip(tokens.tolist(), prompt_lengths):
                rows.append(runner.add(token_ids, prompt_length, row=len(rows)))
            logits = [
                runner.compute([(rows[number], count) for number, count in step]) for step in steps
            ]
            return torch.cat(logits)

    def difference(
        self,
        plain: Tensor,
        computed: Tensor,
        quantity: str = "logits",
        condition: str = "packed",
        reference: str = "a sequence alone",
    ) -> str | None:
        """Returns a message if logits `(n, vocab_size)` differ by more than the tolerance
        (`significant_difference`); otherwise `None`. The message names the `quantity` compared,
        the `condition` under which the model computed it, and the `reference` that gave the `plain`
        logits."""
        distance = significant_difference(plain, computed, self.dtypes)
        if distance is None:
            return None
        return Topic.SELF_CHECK(
            f"{condition}, its {quantity} are {distance} from those of {reference}"
        )


@dataclasses.dataclass(eq=False)
class TrialRow:
    """A sequence of a [`TrialRunner`]; it also stands for its request."""

    tokens: list[int]  # the prompt, and the tokens that follow it
    num_prompt_tokens: int
    blocks: SequenceBlocks
    inputs: Any = None  # `Prompts` and the row's index in them, if the prompt comes from these
    encoded: Any = NO_BLOCKS  # the encoder's blocks
    row: int = 0  # index among the rows of `Trial.run`
    # the tokens known in the current step: the prompt, and later tokens up to the step's end
    token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    media_start: int = 0  # tokens of cached text before the prompt's images or other content
    namespace: Any = UNCACHED
    # equal for all rows
    draft: ClassVar[list[int]] = []
    prompt_logprobs: ClassVar[None] = None

    @property
    def request(self) -> TrialRow:
        return self


class TrialRunner:
    """Runs steps of rows in a layout, as an engine does, in `memory` or in a new one."""

    def __init__(self, trial: Trial, layout: Layout, memory: PagedMemory | None = None) -> None:
        self.trial = trial
        self._is_packed = layout.unsupported_reason is None
        cache = trial.cache.empty_twin(memory or scratch_memory())
        self.manager, self.runner = trial.make_runner(trial.model, cache, layout)

    def add(self, tokens: list[int], num_prompt_tokens: int, **fields: Any) -> TrialRow:
        """Makes a row of `tokens`; the first `num_prompt_tokens` are its prompt."""
        return TrialRow(tokens, num_prompt_tokens, self.manager.new(), **fields)

    def add_prompts(self, prompts: Any, new_tokens: Tensor) -> list[TrialRow]:
        """Makes the rows of `Prompts`, each with its `new_tokens` `(rows or 1, n)` after the
        prompt."""
        rows = []
        following_tokens = new_tokens.expand(len(prompts.paddings), -1).tolist()
        for index, padding in enumerate(prompts.paddings):
            length = prompts.length - padding
            token_ids = prompts.input_ids[index, padding:].tolist()
            if not token_ids:  # the prompt is given as embeddings
                token_ids = [0] * length
            tokens = token_ids + following_tokens[index]
            rows.append(self.add(tokens, length, inputs=(prompts, index)))
        return rows

    def compute(self, rows: Sequence[tuple[TrialRow, int]]) -> Tensor:
        """Runs a step that computes `count` more tokens of `row` for each `(row, count)`; returns
        its logits."""
        for row, count in rows:
            can_skip = not self._is_packed or row.inputs is not None
            row.blocks.append(count, can_skip=can_skip)
            end = max(row.num_prompt_tokens, row.num_computed_tokens + count)
            row.token_ids = row.tokens[:end]
        self.manager.flush_copies()
        logits = self.runner.run(StepPlan.of(rows))
        for row, count in rows:
            row.num_computed_tokens += count
        return logits

    def advance(self, rows: Sequence[TrialRow], num_steps: int = 1) -> Tensor:
        """Runs `num_steps` steps, each of which computes the rest of a row's prompt or, after it,
        one more token. Returns the logits `(num_steps * len(rows), vocab_size)` of all steps."""
        logits = []
        for _ in range(num_steps):
            step = [(row, max(1, row.num_prompt_tokens - row.num_computed_tokens)) for row in rows]
            logits.append(self.compute(step))
        return torch.cat(logits)


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    states = [torch.get_rng_state()]
    for device in devices:
        device_module = torch.get_device_module(device)
        states.append(device_module.get_rng_state(device))
    return states


def stock_cache(model: PreTrainedModel) -> DynamicCache:
    """Returns the empty cache that `generate` would build. Holds the model's `step_lock`, since
    early exit in another thread lowers the number of layers in the config while it drafts."""
    config = model.config.get_text_config(decoder=True)
    with step_lock(model):
        return DynamicCache(config=config)


def sample_tokens(model: PreTrainedModel) -> Tensor:
    """Returns pseudorandom token ids `(3, LENGTH)`, int64, on the model's device: equal in every
    call, and without the special tokens whose ids are integers in the config."""
    config = model.config.get_text_config(decoder=True)
    attributes = {**vars(model.config), **vars(config)}
    special_ids = {
        value
        for name, value in attributes.items()
        if name.endswith("token_id") and isinstance(value, int)
    }
    vocab_size = min(num_embeddings(model), getattr(config, "vocab_size", sys.maxsize))
    if vocab_size == sys.maxsize:
        raise ForwardFailedError("the size of its vocabulary is unknown")
    num_candidates = min(vocab_size, 4096)
    usable_ids = [token for token in range(num_candidates) if token not in special_ids]
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(len(usable_ids), (3, LENGTH), generator=generator, device="cpu")
    tokens = torch.tensor(usable_ids, device="cpu")[indices]
    return tokens.to(compute_device(model))


def product_precision(device: torch.device) -> tuple[str, bool]:
    """Returns torch's options for matrix products on `device`: the precision of float32 products,
    and whether float16 products are accumulated in float16."""
    backend: Any = torch.backends.cuda
    if device.type in ("cpu", "xpu"):
        backend = torch.backends.mkldnn
    matmul = backend.matmul
    return matmul.fp32_precision, device.type == "cuda" and matmul.allow_fp16_accumulation


def significant_difference(
    plain: Tensor, computed: Tensor, dtypes: Iterable[torch.dtype | None]
) -> str | None:
    """Returns, as text, by how many standard deviations of the `plain` logits the `computed` ones
    differ from them, both `(n, vocab_size)`; `None` if the difference is within the tolerance for
    `dtypes`, in which they were computed. The difference is the worst row's or, in half precision,
    where a router may choose another expert for some rows, the median over all rows. It is infinite
    unless both have finite logits at the same positions."""
    finite = plain.isfinite()
    plain = plain.float()
    computed = computed.float()
    row_differences = torch.full((len(plain),), float("inf"), device=plain.device)
    if torch.equal(finite, computed.isfinite()):
        errors = torch.where(finite, plain - computed, 0.0)
        row_errors = errors.square().mean(1).sqrt()  # root mean squares
        row_differences = row_errors / plain[finite].std().clamp_min(1e-6)
    tolerance = half_tolerance(dtypes, plain.device)
    if tolerance is None:
        difference = float(row_differences.max())
    else:
        difference = float(row_differences.sort().values[len(row_differences) // 2])
    if difference <= (tolerance or TOLERANCE):  # false for NaN
        return None
    return f"{difference:.1e} standard deviations"


def half_tolerance(dtypes: Iterable[torch.dtype | None], device: torch.device) -> float | None:
    """Returns the tolerance for logits computed in `dtypes` on `device` if some products have less
    than the precision of float32; otherwise `None`."""
    float32_precision, accumulates_in_half = product_precision(device)
    computed_dtypes = set(dtypes)
    if torch.float32 in computed_dtypes:
        computed_dtypes.add(_PRODUCT_DTYPES.get(float32_precision))
    if torch.float16 in computed_dtypes and accumulates_in_half:
        computed_dtypes.add(torch.bfloat16)
    tolerances = (HALF_TOLERANCE[dtype] for dtype in computed_dtypes if dtype in HALF_TOLERANCE)
    return max(tolerances, default=None)
