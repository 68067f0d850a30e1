"""What a model computes packed and side by side, against plain: a few short forwards on random tokens."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .. import compat
from ..attention.latent import wrap_expansions
from ..attention.switch import switchable_configs, use_paged_attention
from ..cache.block_manager import BlockManager
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.paged_cache import PagedCache
from ..cache.storage import is_out_of_memory
from ..config import PagedConfig
from ..interrupts import held, let_in

# Of the logits' standard deviation. Half precision rounds differently with every shape, by about a fifth of these, and
# a router may then choose another expert for a token or two: so there it is enough that half of the tokens are close.
TOLERANCE, HALF_TOLERANCE = 1e-3, {torch.bfloat16: 5e-2, torch.float16: 1e-2}

_LENGTH = 22  # tokens of each of the three sequences; above the windows and block size of a test's model
_FIRST, _SECOND, _CHUNK = 8, 9, 13  # tokens of the first two's prompts, and of the third's first chunk
# Rows with their `query_len`: prompts side by side; decodes beside a chunk; a chunk after what is cached.
_PACKED_STEPS = ((0, _FIRST), (1, _SECOND)), ((0, 1), (1, 1), (2, _CHUNK)), ((0, 1), (2, _LENGTH - _CHUNK))
# A short and a long row; a row that joins them; one that has left.
_SIDE_STEPS = ((0, _FIRST), (2, _CHUNK)), ((0, 1), (2, 1)), ((1, _SECOND), (0, 1), (2, 1)), ((1, 1), (0, 1))


class Runner(Protocol):
    """`run` takes sequences with their `query_len` and gives logits `(n, vocab_size)`."""

    def run(self, items: list[Any], /) -> torch.Tensor: ...


class Layout(NamedTuple):
    """
    How rows go through a model's forward: packed, unless `unsupported_reason` says why not; then as rectangles.

    Args:
        unsupported_reason (`str`, *optional*): Why not packed.
        mixed_lengths (`bool`): Prompts of different lengths run side by side; else only those of one length.
        side_by_side (`bool`): Rows run side by side at all; else each by itself, in a cache of its own that keeps all
            that the model puts into it.
        replays (`bool`): What is computed again is computed as it was: the prompt, then token by token. The model's
            logits after a prompt are others than after the same tokens one by one.
    """

    unsupported_reason: str | None = None
    mixed_lengths: bool = True
    side_by_side: bool = True
    replays: bool = False

    @property
    def reason(self) -> str:
        """What a [`Route`] says of it."""
        if self.unsupported_reason is None:
            return "packed forwards under the engine's scheduler"
        how = "side by side" if self.side_by_side else "one by one"
        return f"rows {how} under the engine's scheduler, not packed: {self.unsupported_reason}"


ONE_BY_ONE = Layout(mixed_lengths=False, side_by_side=False, replays=True)
MakeRunner = Callable[[PreTrainedModel, PagedCache], Runner]
MakeRectangles = Callable[[PreTrainedModel, PagedCache, Layout], tuple[BlockManager, Runner]]


class ForwardFailedError(Exception):
    """A forward failed in the check: the message says why."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def self_check(model: PreTrainedModel, cache: PagedCache, make_runner: MakeRunner) -> str | None:
    """
    Why packed steps (prompts side by side, decodes beside a chunk, a chunk after what is cached) differ from plain
    forwards (of whole sequences without a cache, and of decode steps over a `DynamicCache`); `None` if they do not.

    Raises:
        ForwardFailedError: if a plain forward fails, which says nothing about packed ones.
        MemoryError, RuntimeError: if memory ran out, which says nothing about the model.
    """
    with _forwards(model):
        rows = _test_tokens(model)
        whole = model(input_ids=rows, use_cache=False, return_dict=True).logits
        decoded = _plain_logits(model, rows[:2, : _FIRST + 2], _FIRST)
    try:
        with _forwards(model):
            paged = _empty_cache(model)
            runner, manager = make_runner(model, paged), paged.memory.manager(paged.groups)
            found = _step_logits(model, manager, runner, rows, (_FIRST, _SECOND, _LENGTH), _PACKED_STEPS, skips=False)
    except ForwardFailedError as error:
        return f"packed, {error}"
    positions = [(0, _FIRST), (1, _SECOND), (0, _FIRST + 1), (1, _SECOND + 1), (0, _FIRST + 2), (2, _LENGTH)]
    alone = torch.stack([whole[row, end - 1] for row, end in positions])
    in_steps = torch.stack([decoded[0, 1], decoded[1, 2], decoded[0, 2]])
    in_any_step = _difference(model, cache, alone, found, "logits")
    return in_any_step or _difference(model, cache, in_steps, found[2:5], "logits of decode steps")


def side_check(model: PreTrainedModel, cache: PagedCache, make_runner: MakeRectangles) -> Layout:
    """Compares rows side by side, joining and leaving, with plain forwards. Raises what `self_check` does."""
    with _forwards(model):
        rows = _test_tokens(model)
        ends = ((_FIRST, 11), (_SECOND, 10), (_CHUNK, 15))  # of each row's prompt, and of what follows it
        short, middle, long = (_plain_logits(model, rows[i : i + 1, :end], n)[0] for i, (n, end) in enumerate(ends))
        at_once = [_plain_logits(model, rows[i : i + 1, :end], end)[0, 0] for i, (_, end) in enumerate(ends)]
    decoded = torch.stack([short[-1], middle[-1], long[-1]])
    replays = _difference(model, cache, decoded, torch.stack(at_once), "logits") is not None
    order = short[0], long[0], short[1], long[1], middle[0], short[2], long[2], middle[1], short[3]
    for layout in (Layout(replays=replays), Layout(mixed_lengths=False, replays=replays)):
        with contextlib.suppress(ForwardFailedError), _forwards(model):
            wrap_expansions(model.modules())
            manager, runner = make_runner(model, _empty_cache(model), layout)
            found = _step_logits(model, manager, runner, rows, (_FIRST, _SECOND, _CHUNK), _SIDE_STEPS, skips=True)
            if _difference(model, cache, torch.stack(order), found, "logits") is None:
                return layout
    return ONE_BY_ONE


@contextlib.contextmanager
def _forwards(model: PreTrainedModel) -> Iterator[None]:
    """
    Within it interrupts are let in. After it, what forwards set on modules (a note of the last length, say, or a
    buffer) and the random state are as before. Raises `ForwardFailedError` for what fails, unless memory ran out.
    """
    devices = [] if model.device.type in ("cpu", "meta") else [model.device]
    rng = torch.random.fork_rng(devices, device_type=model.device.type if devices else "cuda")
    with held(), rng, torch.no_grad():
        before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
        try:
            with let_in():
                yield
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ForwardFailedError(f"its forward fails: {first_line(error)}") from error
        finally:
            for module, attributes, buffers in before:
                for name in vars(module).keys() - attributes.keys():
                    del vars(module)[name]
                vars(module).update(attributes)
                now = module._buffers
                if now.keys() != buffers.keys() or any(now[name] is not buffers[name] for name in buffers):
                    now.clear()
                    now.update(buffers)


def _empty_cache(model: PreTrainedModel) -> PagedCache:
    """In a memory of its own: the model's may be bounded and full."""
    stock = DynamicCache(config=model.config.get_text_config(decoder=True))
    return PagedCache.from_empty(stock, PagedMemory(PagedConfig(block_size=8)))


def _plain_logits(model: Any, rows: torch.Tensor, prompt: int) -> torch.Tensor:
    """`(rows, n, vocab_size)`: after the first `prompt` tokens of rows, and after each later one, as by `generate`."""
    ids, cache = rows[:, :prompt], DynamicCache(config=model.config.get_text_config(decoder=True))
    inputs = first_inputs(model, ids, torch.ones_like(ids), cache)
    logits = []
    for length in range(prompt, rows.shape[1] + 1):
        found, inputs = next_logits(model, rows[:, :length], inputs, begins=length == prompt)
        logits.append(found)
    return torch.stack(logits, dim=1)


def first_inputs(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache | None) -> dict[str, Any]:
    """What `generate` prepares the first forward from, over `ids` with an attention mask, both `(rows, length)`."""
    inputs: dict[str, Any] = {"use_cache": True, "attention_mask": mask}
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        inputs["position_ids"] = compat.prepare_position_ids(model, ids, inputs)
    if cache is not None:
        inputs["cache_params" if "cache_params" in parameters else "past_key_values"] = cache
    return inputs


def next_logits(
    model: Any, ids: torch.Tensor, inputs: dict[str, Any], begins: bool
) -> tuple[torch.Tensor, dict[str, Any]]:
    """`(rows, vocab_size)` after `ids`, of which only the last is new unless the rows begin; the next inputs."""
    count = ids.shape[1] if begins else 1
    prepared = model.prepare_inputs_for_generation(ids, next_sequence_length=count, is_first_iteration=begins, **inputs)
    outputs = model(**prepared, return_dict=True)
    return outputs.logits[:, -1], compat.update_inputs(model, outputs, inputs)


def _step_logits(
    model: PreTrainedModel,
    manager: BlockManager,
    runner: Runner,
    rows: torch.Tensor,
    prompts: tuple[int, int, int],
    steps: tuple[tuple[tuple[int, int], ...], ...],
    skips: bool,
) -> torch.Tensor:
    """
    `(n, vocab_size)`: the logits of `steps`, each of rows with their `query_len`, after each row whose prompt, of so
    many of its tokens as `prompts` says, is computed. `skips` as in `BlockManager.append`.
    """
    tokens = rows.tolist()
    sequences = [SimpleNamespace(num_computed_tokens=0, token_ids=[], blocks=manager.new()) for _ in tokens]
    logits = []
    with held(), use_paged_attention(switchable_configs(model.modules())), let_in():
        for step in steps:
            for row, query_len in step:
                sequence = sequences[row]
                manager.append(sequence.blocks, query_len, skips=skips)
                sequence.num_computed_tokens += query_len
                sequence.token_ids = tokens[row][: max(prompts[row], sequence.num_computed_tokens)]
            logits.append(runner.run([(sequences[row], query_len) for row, query_len in step]))
    for sequence in sequences:
        manager.free(sequence.blocks)
    return torch.cat(logits)


def _difference(
    model: PreTrainedModel, cache: PagedCache, plain: torch.Tensor, packed: torch.Tensor, what: str
) -> str | None:
    """How far logits `(n, vocab_size)` are apart, if that is too far; NaN and infinities must agree."""
    plain, packed, finite = plain.float(), packed.float(), plain.isfinite()
    gap = torch.full((len(plain),), float("inf"))
    if torch.equal(finite, packed.isfinite()):  # root mean square of each row, in standard deviations
        gap = torch.where(finite, plain - packed, 0.0).square().mean(1).sqrt() / plain[finite].std().clamp_min(1e-6)
    computed = autocast_dtype(model.device) or model.dtype  # some models widen their logits
    dtypes = (computed, *(spec.storage_dtype(computed) for spec in cache.groups))
    half = max((HALF_TOLERANCE[dtype] for dtype in dtypes if dtype in HALF_TOLERANCE), default=None)
    worst = float(gap.max() if half is None else gap.sort().values[len(gap) // 2])
    if not worst <= (half or TOLERANCE):  # NaN too
        return f"packed, its {what} are {worst:.1e} standard deviations from those of a sequence alone"
    return None


def _test_tokens(model: PreTrainedModel) -> torch.Tensor:
    """`(3, _LENGTH)` int64, none of them a token with a meaning of its own."""
    config = model.config.get_text_config(decoder=True)
    values = (value for name, value in {**vars(model.config), **vars(config)}.items() if name.endswith("token_id"))
    special = {value for value in values if isinstance(value, int)}
    vocab_size = min(model.get_input_embeddings().weight.shape[0], getattr(config, "vocab_size", 1 << 30))
    usable = torch.tensor([token for token in range(min(vocab_size, 4096)) if token not in special])
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(usable), (3, _LENGTH), generator=generator)
    return usable[chosen].to(model.device)
