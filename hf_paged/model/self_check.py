"""What a model computes packed, against what it computes plain: a few short forwards on random tokens."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.utils import GenerationMixin

from .. import compat
from ..attention.latent import wrap_expansions
from ..attention.switch import use_paged_attention
from ..cache.block_manager import BlockManager
from ..cache.layers import PagedLayer, PagedSlidingWindowLayer
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.packed import EMPTY_LAYERS
from ..cache.paged_cache import PagedCache
from ..cache.storage import is_out_of_memory
from ..config import PagedConfig
from ..interrupts import held, let_in

PREPARE = "prepare_inputs_for_generation"
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
    """What `batching.execution.packed.PackedRunner` does for the check."""

    def run(self, items: list[Any], /) -> torch.Tensor:
        """Sequences and their `query_len` to logits `(n, vocab_size)`."""


MakeRunner = Callable[[PreTrainedModel, PagedCache], Runner]


class Sides(NamedTuple):
    """
    Which rows may run side by side.

    Args:
        prompts (`bool`): Prompts of different lengths; else only those of one length.
        rows (`bool`): Rows at all; else each runs by itself, in a cache of its own that keeps all that the model puts
            into it.
        replays (`bool`): What is computed again is computed as it was: the prompt, then token by token. The model's
            logits after a prompt are others than after the same tokens one by one.
    """

    prompts: bool = True
    rows: bool = True
    replays: bool = False


NO_SIDES = Sides(prompts=False, rows=False, replays=True)
MakeRectangles = Callable[[PreTrainedModel, PagedCache, Sides], tuple[BlockManager, Runner]]


class ForwardFailedError(Exception):
    """A plain forward failed in the check, so that there is nothing to compare with: the message says why."""


def input_check(model: PreTrainedModel, cache: PagedCache) -> str | None:
    """
    Whether the model's own preparation of inputs gives, for text, anything but what transformers' own does, in a first
    forward and in one after it.
    """
    own = getattr(type(model), PREPARE)
    stock = getattr(GenerationMixin, PREPARE)
    if own is stock:
        return None
    rows = _test_tokens(model)
    for past in (0, _FIRST):
        length = _FIRST + past
        stock_cache = _stock_twin(cache)
        if past:
            states = torch.zeros(len(rows), 1, past, 1, dtype=model.dtype, device=model.device)
            for layer in stock_cache.layers:
                if not isinstance(layer, EMPTY_LAYERS):
                    layer.update(states, states)
        arguments = _arguments(rows[:, :length], past, stock_cache)
        try:
            with held(), torch.random.fork_rng([]), _unchanged(model), torch.no_grad(), let_in():
                given, expected = (_without_defaults(model, make(model, **arguments)) for make in (own, stock))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"its own `{PREPARE}` fails: {first_line(error)}"
        if given.keys() != expected.keys() or not all(_same(given[name], expected[name]) for name in given):
            return f"its own `{PREPARE}` gives other inputs"
    return None


def _arguments(token_ids: torch.Tensor, past: int, held: DynamicCache) -> dict[str, Any]:
    """What `generate` prepares the inputs from of a forward over `token_ids`, the first `past` of which are cached."""
    return {
        "input_ids": token_ids,
        "attention_mask": torch.ones_like(token_ids),
        "past_key_values": held,
        "next_sequence_length": token_ids.shape[1] - past,
        "is_first_iteration": past == 0,
        "use_cache": True,
    }


def _without_defaults(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs but for those that the forward would take to be so anyway."""
    parameters = inspect.signature(model.forward).parameters
    return {
        name: value
        for name, value in inputs.items()
        if name not in parameters or not _same(value, parameters[name].default)
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a is b or (isinstance(a, (bool, int, float, str)) and a == b)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def self_check(model: PreTrainedModel, cache: PagedCache, make_runner: MakeRunner) -> str | None:
    """
    Compares packed steps, with prompts side by side, decodes beside a chunk, and a chunk after what is cached, with
    plain forwards: of whole sequences without a cache, and of decode steps over a `DynamicCache`. The model, the random
    state and the memory behind `cache` are left as they were. Returns why they differ, or `None`.

    Raises:
        ForwardFailedError: if a plain forward fails, which says nothing about packed ones.
        MemoryError, RuntimeError: if memory ran out, which says nothing about the model.
    """
    decoded = None
    try:
        with _undisturbed(model):
            rows = _test_tokens(model)
            whole = model(input_ids=rows, use_cache=False, return_dict=True).logits
            decoded = _plain_logits(model, rows[:2, : _FIRST + 2], _FIRST)
            memory = PagedMemory(PagedConfig(block_size=8))  # its own: the model's may be bounded and full
            paged = PagedCache.from_empty(_stock_twin(cache), memory)
            runner, manager = make_runner(model, paged), memory.manager(paged.groups)
            found = _step_logits(model, manager, runner, rows, (_FIRST, _SECOND, _LENGTH), _PACKED_STEPS, skips=False)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if decoded is None:
            raise ForwardFailedError(f"its forward fails: {first_line(error)}") from error
        return f"packed, its forward fails: {first_line(error)}"
    positions = [(0, _FIRST), (1, _SECOND), (0, _FIRST + 1), (1, _SECOND + 1), (0, _FIRST + 2), (2, _LENGTH)]
    alone = torch.stack([whole[row, end - 1] for row, end in positions])
    in_steps = torch.stack([decoded[0, 1], decoded[1, 2], decoded[0, 2]])
    in_any_step = _difference(model, cache, alone, found, "logits")
    return in_any_step or _difference(model, cache, in_steps, found[2:5], "logits of decode steps")


def side_check(model: PreTrainedModel, cache: PagedCache, make_runner: MakeRectangles) -> Sides:
    """
    Compares rows side by side, joining and leaving, with plain forwards over a `DynamicCache`. Leaves the model and the
    random state as `self_check` does, and raises what it raises.
    """
    alone: torch.Tensor | None = None
    replays = True
    for sides in (Sides(), Sides(prompts=False)):
        try:
            with _undisturbed(model):
                rows = _test_tokens(model)
                if alone is None:
                    short, middle, long = (
                        _plain_logits(model, rows[row : row + 1, :length], prompt)[0]
                        for row, (prompt, length) in enumerate(((_FIRST, 11), (_SECOND, 10), (_CHUNK, 15)))
                    )
                    order = short[0], long[0], short[1], long[1], middle[0], short[2], long[2], middle[1], short[3]
                    alone = torch.stack(order)
                    lengths = ((0, 11), (1, 10), (2, 15))
                    at_once = [
                        _plain_logits(model, rows[row : row + 1, :length], length)[0, 0] for row, length in lengths
                    ]
                    decoded = torch.stack([short[-1], middle[-1], long[-1]])
                    replays = _difference(model, cache, decoded, torch.stack(at_once), "logits") is not None
                stock = DynamicCache(config=model.config.get_text_config(decoder=True))
                paged = PagedCache.from_empty(stock, PagedMemory(PagedConfig(block_size=8)))
                wrap_expansions(model.modules())
                manager, runner = make_runner(model, paged, sides)
                found = _step_logits(model, manager, runner, rows, (_FIRST, _SECOND, _CHUNK), _SIDE_STEPS, skips=True)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if alone is None:
                raise ForwardFailedError(f"its forward fails: {first_line(error)}") from error
            continue
        if _difference(model, cache, alone, found, "logits") is None:
            return sides._replace(replays=replays)
    return NO_SIDES


def _plain_logits(model: Any, rows: torch.Tensor, prompt: int) -> torch.Tensor:
    """`(rows, n, vocab_size)`: after the first `prompt` tokens of rows, and after each later one, as by `generate`."""
    inputs: dict[str, Any] = {"use_cache": True, "attention_mask": torch.ones_like(rows[:, :prompt])}
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        inputs["position_ids"] = compat.prepare_position_ids(model, rows[:, :prompt], inputs)
    name = "cache_params" if "cache_params" in parameters else "past_key_values"
    inputs[name] = DynamicCache(config=model.config.get_text_config(decoder=True))
    logits = []
    for length in range(prompt, rows.shape[1] + 1):
        begins = length == prompt
        count = length if begins else 1
        prepared = getattr(model, PREPARE)(
            rows[:, :length], next_sequence_length=count, is_first_iteration=begins, **inputs
        )
        outputs = model(**prepared, return_dict=True)
        inputs = compat.update_inputs(model, outputs, inputs)
        logits.append(outputs.logits[:, -1])
    return torch.stack(logits, dim=1)


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
    `(n, vocab_size)`: the logits of steps, after each row that is computed as far as its prompt goes.

    Args:
        prompts (`tuple[int, int, int]`): Tokens of each row's prompt; what follows is decoded.
        steps: Of each step, rows with their `query_len`.
        skips (`bool`): As in `BlockManager.append`.
    """
    tokens = rows.tolist()
    sequences = [SimpleNamespace(num_computed_tokens=0, token_ids=[], blocks=manager.new()) for _ in tokens]

    def item(row: int, query_len: int) -> tuple[Any, int]:
        sequence = sequences[row]
        manager.append(sequence.blocks, query_len, skips=skips)
        sequence.num_computed_tokens += query_len
        sequence.token_ids = tokens[row][: max(prompts[row], sequence.num_computed_tokens)]
        return sequence, query_len

    with held(), use_paged_attention(model), let_in():
        logits = [runner.run([item(*each) for each in step]) for step in steps]
    for sequence in sequences:
        manager.free(sequence.blocks)
    return torch.cat(logits)


def _difference(
    model: PreTrainedModel, cache: PagedCache, plain: torch.Tensor, packed: torch.Tensor, what: str
) -> str | None:
    """How far logits `(n, vocab_size)` are apart, if that is too far."""
    gap = _gap(plain.float(), packed.float())
    computed = autocast_dtype(model.device) or model.dtype  # some models widen their logits
    dtypes = (computed, *(spec.storage_dtype(computed) for spec in cache.groups))
    half = max((HALF_TOLERANCE[dtype] for dtype in dtypes if dtype in HALF_TOLERANCE), default=None)
    worst = float(gap.max() if half is None else gap.sort().values[len(gap) // 2])
    if not worst <= (half or TOLERANCE):  # NaN too
        return f"packed, its {what} are {worst:.1e} standard deviations from those of a sequence alone"
    return None


def _gap(plain: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Root mean square difference of each row in standard deviations; NaN and infinities must agree."""
    finite = plain.isfinite()
    if not torch.equal(finite, packed.isfinite()):
        return torch.full((len(plain),), float("inf"))
    difference = torch.where(finite, plain - packed, 0.0).square().mean(1).sqrt()
    return difference / plain[finite].std().clamp_min(1e-6)


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


def _stock_twin(cache: PagedCache) -> DynamicCache:
    """An empty stock cache with the same layers."""
    stock = DynamicCache()
    stock.layer_class_to_replicate = None
    for layer in cache.layers:
        if isinstance(layer, PagedSlidingWindowLayer):
            stock.layers.append(DynamicSlidingWindowLayer(layer.sliding_window))
        else:
            stock.layers.append(DynamicLayer() if isinstance(layer, PagedLayer) else type(layer)())
    return stock


@contextlib.contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Model and random state are left as they were; interrupts are let in."""
    devices = [] if model.device.type in ("cpu", "meta") else [model.device]
    rng = torch.random.fork_rng(devices, device_type=model.device.type if devices else "cuda")
    with held(), rng, _unchanged(model), torch.no_grad(), let_in():
        yield


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back what a forward sets on modules (a note of the last length, say), buffers included."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
            if module._buffers.keys() != buffers.keys() or any(module._buffers[k] is not v for k, v in buffers.items()):
                module._buffers.clear()
                module._buffers.update(buffers)
