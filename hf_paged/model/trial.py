"""Runs short forwards of a model, plain ones and steps as an engine runs them, and compares their
logits. It judges no layout: `checks` does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from .. import compat
from ..attention.latent import wrap_expansions
from ..attention.switch import compiled_layers, switchable_configs, use_paged_attention
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
from ..topics import Topic
from .forwards import compute_device
from .layout import Layout
from .own_loop import cache_parts, first_inputs, next_logits, tensors_of
from .writes import Snapshot, Write

# `execution.executor.Runner`
MakeRunner = Callable[[PreTrainedModel, PagedCache, Layout], tuple[BlockManager, Any]]
Step = tuple[tuple[int, int], ...]  # (row number, tokens to compute) of each row

# In standard deviations of the logits. Half precision rounds differently with every shape, by about
# a fifth of these values, and a router may then choose another expert for a token or two; so in
# half precision only half of the tokens must be close.
TOLERANCE = 1e-3
HALF_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
# The half precision with as many bits as torch's options leave to operands of float32 products.
_ROUNDED = {"tf32": torch.float16, "bf16": torch.bfloat16}

# blocks of the default size: a GPU then compiles kernels once for the checks and the calls
CONFIG = PagedConfig(block_size=16, kv_dtype=None, storage="blocks")
# Checks use a separate memory, since the model's may be bounded and full. `hf_paged.budget` does
# not count it: a check that ran out of budget would find that the model cannot be packed.
scratch_memory = functools.partial(PagedMemory, CONFIG, is_bounded=False)

LENGTH = 22
"""Tokens of each of the three sequences: more than the block size and than the sliding windows of
the tests' models."""


class ForwardFailedError(Exception):
    """A forward failed in a check. If the cause `is_permanent`, later checks would fail as well."""

    is_permanent = False


class WritesLostError(ForwardFailedError):
    """A forward's writes cannot be undone."""

    is_permanent = True


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@dataclasses.dataclass
class Trial:
    """A model under check."""

    model: PreTrainedModel
    cache: PagedCache  # built for the model; stays empty
    make: MakeRunner
    prompts: Any = None  # `execution.prompts.Prompts`, if the check is of a call's prompts
    writes: list[Write] = dataclasses.field(default_factory=list)  # those of its forwards

    def __post_init__(self) -> None:
        dtype = autocast_dtype(compute_device(self.model))
        # dtypes in which the logits were computed: a model may turn on autocast by itself
        self.dtypes = {self.model.dtype, dtype}

    @restoring
    def forwards(self, by_engine: bool = False) -> Iterator[None]:
        """A context for forwards. Undoes their writes into modules, which it adds to `writes`, and
        restores the random state; layers with a cache run without compiled code, as in steps.
        `by_engine`: these are the engine's forwards, which call our attention, and not plain ones.
        Raises `ForwardFailedError` for any error but out of memory, for a forward that draws random
        numbers, and for one whose writes cannot be undone."""
        model = self.model
        device = compute_device(model)
        devices: list[torch.device] = []
        if device.type not in ("cpu", "meta"):
            devices.append(device)
        modules = list(model.modules())
        attention = NOTHING
        if by_engine:
            wrap_expansions(modules)
            attention = use_paged_attention(switchable_configs(modules))
        with (
            torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
            torch.no_grad(),
            running_eagerly(compiled_layers(modules)),
            attention,
        ):
            snapshot = Snapshot(model)
            drawn = _random_states(devices)
            try:
                yield
                if snapshot.has_drawn or not all(map(torch.equal, drawn, _random_states(devices))):
                    # rows of one prompt would share these numbers
                    raise RuntimeError("it draws random numbers")
            except Exception as error:
                if is_interrupt(error) or is_out_of_memory(error):
                    raise
                raise ForwardFailedError(f"its forward fails: {first_line(error)}") from error
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
        new: Tensor,
        around: Callable[[int], AbstractContextManager[Any]] = lambda length: NOTHING,
    ) -> Tensor:
        """Plain logits `(1 + n, rows, vocab_size)` after `ids`, and after each of the tokens `new`
        `(rows or 1, n)` behind them. `around(length)` makes the context of the forward that ends
        after `length` tokens. Adds to `dtypes`."""
        model = self.model
        cache: Any = stock_cache(model)
        if model.config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, stock_cache(model))
        if compat.supports_dynamic_cache(model):
            inputs = {**inputs, compat.cache_name(model): cache}
        new = new.expand(len(ids), -1)
        logits = []
        for count in range(new.shape[1] + 1):
            tokens = torch.cat([ids, new[:, :count]], dim=1)
            with around(tokens.shape[1]):
                step_logits, inputs = next_logits(model, tokens, inputs, is_first_step=not count)
            logits.append(step_logits)
        cached = [vars(layer) for part in cache_parts(cache) for layer in part.layers]
        self.dtypes |= {x.dtype for x in tensors_of(cached) if x.is_floating_point()}
        return torch.stack(logits)

    def plain(self, rows: Tensor, prompt: int, padding: int = 0) -> Tensor:
        """As `decode`, after the first `prompt` tokens of `rows`, the first `padding` of which are
        masked, and after each later token."""
        ids = rows[:, :prompt]
        mask = torch.ones_like(ids)
        mask[:, :padding] = 0
        return self.decode(ids, first_inputs(self.model, ids, mask, None), rows[:, prompt:])

    def run(
        self,
        layout: Layout,
        tokens: Tensor,
        prompts: Sequence[int],
        steps: Iterable[Step],
        memory: PagedMemory | None = None,
    ) -> Tensor:
        """Logits `(n, vocab_size)` of all `steps` of rows with these `tokens`; `prompts` are the
        lengths of their prompts. The steps run in `memory`, or in a new one."""
        with self.forwards(by_engine=True):
            runner = TrialRunner(self, layout, memory)
            rows = list[TrialRow]()
            for token_ids, prompt in zip(tokens.tolist(), prompts):
                rows.append(runner.add(token_ids, prompt, row=len(rows)))
            logits = []
            for step in steps:
                logits.append(runner.compute([(rows[number], count) for number, count in step]))
            return torch.cat(logits)

    def difference(
        self, plain: Tensor, computed: Tensor, quantity: str = "logits", how: str = "packed"
    ) -> str | None:
        """Says how far logits `(n, vocab_size)` differ if that exceeds the tolerance, else `None`.
        NaN and infinities must have the same positions."""
        dtypes = self.dtypes - {None}
        excess = excess_of(plain, computed, dtypes)
        if excess is None:
            return None
        return Topic.SELF_CHECK(
            f"{how}, its {quantity} are {excess} from those of a sequence alone"
        )


@dataclasses.dataclass(eq=False)
class TrialRow:
    """Stands for a sequence of a [`TrialRunner`], and for its request."""

    tokens: list[int]  # those of the prompt, and those that follow
    num_prompt_tokens: int
    blocks: SequenceBlocks
    inputs: Any = None  # `Prompts` and the row's number in them, if the prompt comes from these
    encoded: Any = NO_BLOCKS
    row: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_text: int = 0
    namespace: Any = UNCACHED
    # equal in all rows
    draft: ClassVar[list[int]] = []
    prompt_logprobs: ClassVar[None] = None

    @property
    def request(self) -> TrialRow:
        return self


class TrialRunner:
    """Runs steps of rows in `layout`, in `memory` or in a new one."""

    def __init__(self, trial: Trial, layout: Layout, memory: PagedMemory | None = None) -> None:
        self._trial = trial
        self._is_packed = layout.unsupported_reason is None
        cache = trial.cache.empty_twin(memory or scratch_memory())
        self.manager, self.runner = trial.make(trial.model, cache, layout)

    def add(self, tokens: list[int], num_prompt_tokens: int, **others: Any) -> TrialRow:
        """A row that continues its prompt with the other `tokens`."""
        return TrialRow(tokens, num_prompt_tokens, self.manager.new(), **others)

    def add_prompts(self, prompts: Any, new: Tensor) -> list[TrialRow]:
        """The rows of `Prompts`, each with the tokens `new` `(rows or 1, n)` behind its prompt."""
        encoders = self.runner.encoder_blocks
        rows = []
        tokens_behind = new.expand(len(prompts.paddings), -1).tolist()
        for number, padding in enumerate(prompts.paddings):
            length = prompts.length - padding
            token_ids = prompts.input_ids[number, padding:].tolist()
            if not token_ids:  # the prompt is given as embeddings
                token_ids = [0] * length
            encoded = NO_BLOCKS
            if encoders is not None:
                encoded = encoders.new()
                encoders.append(encoded, prompts.num_encoder_tokens)
            tokens = token_ids + tokens_behind[number]
            rows.append(self.add(tokens, length, inputs=(prompts, number), encoded=encoded))
        return rows

    def compute(self, rows: Sequence[tuple[TrialRow, int]]) -> Tensor:
        """Logits of a step that computes `count` more tokens of each `(row, count)`."""
        for row, count in rows:
            skips = not self._is_packed or row.inputs is not None
            self.manager.append(row.blocks, count, skips=skips)
            end = max(row.num_prompt_tokens, row.num_computed_tokens + count)
            row.token_ids = row.tokens[:end]
        self.manager.flush_copies()
        logits: Tensor = self.runner.run(StepPlan.of(rows))
        for row, count in rows:
            row.num_computed_tokens += count
        return logits

    def advance(self, rows: Sequence[TrialRow], num_steps: int = 1) -> Tensor:
        """Logits `(num_steps * n, vocab_size)` of steps that compute the rest of each row's prompt,
        or one more token."""
        logits = []
        for _ in range(num_steps):
            step = []
            for row in rows:
                step.append((row, max(1, row.num_prompt_tokens - row.num_computed_tokens)))
            logits.append(self.compute(step))
        return torch.cat(logits)

    def advance_apart(self, *rows: TrialRow) -> Tensor:
        """As `advance`, but restores the modules after the step, as if another call had run
        between two steps."""
        with self._trial.forwards(by_engine=True):
            return self.advance(rows)


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    states = [torch.get_rng_state()]
    for device in devices:
        device_module = torch.get_device_module(device)
        states.append(device_module.get_rng_state(device))
    return states


def stock_cache(model: PreTrainedModel) -> DynamicCache:
    config = model.config.get_text_config(decoder=True)
    return DynamicCache(config=config)


def sample_tokens(model: PreTrainedModel) -> Tensor:
    """Token ids `(3, LENGTH)` int64, without special tokens."""
    config = model.config.get_text_config(decoder=True)
    attributes = {**vars(model.config), **vars(config)}
    special = {
        value
        for name, value in attributes.items()
        if name.endswith("token_id") and isinstance(value, int)
    }
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    num_tried = min(num_embeddings, getattr(config, "vocab_size", num_embeddings), 4096)
    usable = [token for token in range(num_tried) if token not in special]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(usable), (3, LENGTH), generator=generator, device="cpu")
    tokens = torch.tensor(usable, device="cpu")[chosen]
    return tokens.to(compute_device(model))


def product_precision(device: torch.device) -> tuple[str, bool]:
    """Torch's options for matrix products on `device`: the precision of float32 products, and
    whether float16 products are summed in float16."""
    backend: Any = torch.backends.cuda
    if device.type in ("cpu", "xpu"):
        backend = torch.backends.mkldnn
    of_float32 = backend.matmul.fp32_precision
    sums_in_half = False
    if device.type == "cuda":
        sums_in_half = backend.matmul.allow_fp16_accumulation
    return of_float32, sums_in_half


def excess_of(plain: Tensor, computed: Tensor, dtypes: Iterable[torch.dtype | None]) -> str | None:
    """Says how far logits `(n, vocab_size)` that were computed in `dtypes` differ, in standard
    deviations: the worst row's difference or, in half precision, where a router may choose another
    expert for a row, the median. `None` if that is tolerated. NaN and infinities must have the same
    positions."""
    finite = plain.isfinite()
    plain = plain.float()
    computed = computed.float()
    gap = torch.full((len(plain),), float("inf"), device=plain.device)
    if torch.equal(finite, computed.isfinite()):
        # root mean square of each row
        errors = torch.where(finite, plain - computed, 0.0)
        root_mean_square = errors.square().mean(1).sqrt()
        gap = root_mean_square / plain[finite].std().clamp_min(1e-6)
    half = half_tolerance(dtypes, plain.device)
    if half is None:
        worst = float(gap.max())
    else:
        worst = float(gap.sort().values[len(gap) // 2])
    if worst <= (half or TOLERANCE):  # false for NaN
        return None
    return f"{worst:.1e} standard deviations"


def half_tolerance(dtypes: Iterable[torch.dtype | None], device: torch.device) -> float | None:
    """The tolerance of logits computed in `dtypes` on `device`; `None` if all products have
    float32's precision."""
    of_float32, sums_in_half = product_precision(device)
    computed = set(dtypes)
    if torch.float32 in computed:
        computed.add(_ROUNDED.get(of_float32))
    if torch.float16 in computed and sums_in_half:
        computed.add(torch.bfloat16)
    tolerances = (HALF_TOLERANCE[dtype] for dtype in computed if dtype in HALF_TOLERANCE)
    return max(tolerances, default=None)
