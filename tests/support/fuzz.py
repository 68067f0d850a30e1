"""Differential fuzz: random `generate` calls, plain against `cache_implementation="paged"`, in
float32.

    python -m tests.support.fuzz --cases 500 [--seed 0] [--jobs 2] [--model llama] [--only CASE]

Equal means: tokens, shapes, dtypes, the final random state and everything passed to user code are
identical; floating point values are close, up to a row's end; where plain raises, paged raises an
exception of the same type. A call with a budget of blocks may raise `OutOfBlocksError` instead.
After each call the pool is intact and empty, and the model is unchanged.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import PreTrainedModel

import hf_paged
from hf_paged.cache.block_pool import OutOfBlocksError
from hf_paged.rooms import RoomMissingError
from tests.support import fuzz_cases, models, tools
from tests.support.checks import assert_equal, assert_pool_empty, model_state
from tests.support.fuzz_cases import GREEDY_STEPS, Case
from tests.support.workers import Lost
from tests.test_parity_matrix import Refusal, assert_same, assert_same_tensor

HANG_SECONDS = 180.0  # a case takes less than a second

KINDS = ("equal", "refused", "out of blocks", "other draws")  # refused: by plain and paged


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one call of a case: `how` is one of `KINDS`."""

    number: int
    mode: str
    road: str
    how: str


# --------------------------------------------------------------------------------------- one call


def generate(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any], paged: bool
) -> Any:
    """The call under test; `options` already include those of `paged`."""
    return model.generate(**inputs, **options)


def play(
    model: PreTrainedModel, inputs: dict[str, Any], options: dict[str, Any], seed: int, paged: bool
) -> Any:
    """Output of the call with the final random state, or its exception."""
    torch.manual_seed(seed)
    try:
        return generate(model, inputs, options, paged), torch.get_rng_state()
    except RoomMissingError:
        raise
    except Exception as error:
        return Refusal(
            type(error), f"{error}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"
        )


def greedy_text(model: PreTrainedModel, inputs: dict[str, Any]) -> list[list[int]]:
    """Plain greedy text of each row, for end tokens and stop strings."""
    new = model.generate(
        **inputs, do_sample=False, min_new_tokens=GREEDY_STEPS, max_new_tokens=GREEDY_STEPS
    )
    return new[:, -GREEDY_STEPS:].tolist()


def num_blocks(case: Case, model: PreTrainedModel, width: int) -> int:
    """The budget in blocks, for all layer groups that the model may have."""
    options = case.options
    rows = len(case.lengths) * max(
        options.get("num_beams", 1), options.get("num_return_sequences", 1)
    )
    groups = len(set(getattr(model.config, "layer_types", None) or [0]))
    longest = -(-(width + 24) // case.cache_config["block_size"])
    return max(1, round((case.budget or 0) * rows * groups * longest))


def run_case(case: Case) -> list[Outcome]:
    """Runs every call of `case` with plain and with paged. Raises `AssertionError` where they
    differ."""
    model = models.get(case.model)
    hf_paged.free(model)  # drop the state of earlier cases, so that a case repeats alone
    model.train(case.train)
    try:
        return [*_calls(case, model)]
    finally:
        model.eval()


def _calls(case: Case, model: PreTrainedModel) -> Any:
    rows = fuzz_cases.prompts(case)
    for index, kind in enumerate(case.calls):
        inputs = fuzz_cases.inputs(case, rows, model)
        width = max(map(len, rows))
        greedy = greedy_text(model, inputs) if {"ends", "stop_strings"} & case.late.keys() else []
        plain, paged = (fuzz_cases.arguments(case, width, greedy) for _ in range(2))
        paged.arguments.setdefault("cache_implementation", "paged")
        if "cache_implementation" not in case.options:
            budget = {} if case.budget is None else {"num_blocks": num_blocks(case, model, width)}
            paged.arguments["cache_config"] = case.cache_config | budget
        expected = play(model, inputs, plain.arguments, case.number + index, paged=False)
        # taken here, since plain leaves hooks for `output_hidden_states`
        before = model_state(model)
        actual = play(model, inputs, paged.arguments, case.number + index, paged=True)
        where = f"call {index} ({kind})"
        shown = plain.seen(), paged.seen()
        route = hf_paged.last_route(model)
        road = route.road if route else "none"
        returned = 0 if case.mask == "embeds" else width  # prompt tokens of the sequences
        how = compare(case, road, returned, expected, actual, shown, where)
        assert model_state(model) == before, f"{where}: the model is not as it was"
        sequences = None if isinstance(expected, Refusal) else sequences_of(expected[0])
        del expected, actual
        assert_pool_empty(model, where)
        yield Outcome(case.number, case.mode, road, how)
        if sequences is None or case.mask == "embeds":
            return
        if index + 1 < len(case.calls) and case.calls[index + 1] == "turn":
            rows = fuzz_cases.turn(rows, sequences, seed=case.number + index)


def sequences_of(output: Any) -> torch.Tensor:
    """The returned tokens, prompts included."""
    return output if isinstance(output, torch.Tensor) else output["sequences"]


# ------------------------------------------------------------------------------------- comparison


def compare(
    case: Case,
    road: str,
    width: int,
    expected: Any,
    actual: Any,
    shown: tuple[list[Any], list[Any]],
    where: str,
) -> str:
    """Classifies the call for `Outcome`. Raises `AssertionError` where paged differs from plain.
    `road`: of the paged call; `width`: prompt tokens of the returned sequences; `shown`: values
    passed to user code, by plain and by paged."""
    if isinstance(actual, Refusal) and issubclass(actual.error, OutOfBlocksError):
        assert case.budget is not None, f"{where}: out of blocks without a budget: {actual.message}"
        return "out of blocks"
    if isinstance(expected, Refusal) or isinstance(actual, Refusal):
        assert_same(expected, actual, where)
        return "refused"
    (output, state), (output_paged, state_paged) = expected, actual
    open_rows = OpenRows(case, output, width)
    if case.options["do_sample"] and (case.budget or 1.0) < 1.0 and road == "engine":
        # a seed gives plain's samples only if the whole batch is in flight, which may not hold here
        sequences, others = sequences_of(output), sequences_of(output_paged)
        if sequences.shape != others.shape or not torch.equal(sequences, others):
            assert_same(sequences[:, :width], others[:, :width], f"{where}, prompts")
            return "other draws"
    compare_output(case, output, output_paged, open_rows, where)
    assert torch.equal(state, state_paged), f"{where}: another random state afterwards"
    for left, right in zip(*shown, strict=True):
        assert_same(
            open_rows.of_shown(left), open_rows.of_shown(right), f"{where}, shown to user code"
        )
    return "equal"


def compare_output(case: Case, expected: Any, actual: Any, open_rows: OpenRows, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        return assert_same(expected, actual, where)
    assert_equal(type(expected), type(actual), where)
    assert_equal(list(expected), list(actual), f"{where}: fields")
    assert_same(expected["sequences"], actual["sequences"], f"{where}.sequences")
    for field in expected:
        left, right, place = expected[field], actual[field], f"{where}.{field}"
        if field not in ("scores", "logits", "hidden_states"):
            assert_same(left, right, place)
            continue
        assert_equal(f"{len(left)} steps", f"{len(right)} steps", place)
        for step, (one, other) in enumerate(zip(left, right)):
            compare_step(one, other, open_rows.at(step), f"{place}[{step}]", case, first=step == 0)
    return None


def compare_step(
    expected: Any, actual: Any, rows: list[int], where: str, case: Case, first: bool
) -> None:
    """Compares a step's tensor, or its tensors by layer, in the open rows; for a prompt only at its
    last position."""
    if isinstance(expected, tuple):
        assert_equal(f"{len(expected)} layers", f"{len(actual)} layers", where)
        for layer, (one, other) in enumerate(zip(expected, actual)):
            compare_step(one, other, rows, f"{where}[{layer}]", case, first)
        return
    assert_equal(expected.shape, actual.shape, f"{where}: shape")
    if expected.ndim == 3 and first:
        # padding positions are not compared; the shorter positions of a prompt follow from the last
        # one
        shortest = 1 if case.mask == "hole" else min(case.lengths)
        expected, actual = expected[:, -shortest:], actual[:, -shortest:]
    assert_same_tensor(expected[rows], actual[rows], where)


class OpenRows:
    """Rows of the batch, expanded to samples or beams, that have not ended when a step's token is
    chosen. `width`: prompt tokens of the sequences.
    """

    def __init__(self, case: Case, output: Any, width: int) -> None:
        sequences, self.beams = sequences_of(output), case.options.get("num_beams", 1)
        indices = None if sequences is output else output.get("beam_indices")
        if self.beams > 1 and indices is not None:
            self.ends = [width + int((row >= 0).sum()) for row in indices]
        else:
            # trailing padding follows the end; of beams, padded with transformers' token, at least
            # the end token itself belongs to the row
            is_beams = int(self.beams > 1)
            padding = sequences[:, -1:] if is_beams else 0
            self.ends = [
                int(words[-1]) + 1 + is_beams if len(words := row.nonzero()) else is_beams
                for row in sequences != padding
            ]
        if self.beams > 1:
            # a prompt's beams are open while its longest returned answer grew
            each, ends = case.options.get("num_return_sequences", 1), self.ends
            starts = range(0, len(ends), each)
            self.ends = [max(ends[at : at + each]) for at in starts for _ in range(self.beams)]
        self.width = width

    def at(self, step: int) -> list[int]:
        return self.of_length(self.width + step)

    def of_length(self, length: int) -> list[int]:
        return [row for row, end in enumerate(self.ends) if length < end]

    def of_shown(self, shown: list[Any]) -> list[Any]:
        """The tensors or ids passed to a processor or a `prefix_allowed_tokens_fn`, without those
        of finished beams, which are not compared if they were not returned. Ended samples show
        padding, which is compared.
        """
        if self.beams == 1:
            return shown
        kept: list[Any] = []
        for item in shown:
            if isinstance(item, torch.Tensor):
                kept.append((item.shape, item[self.of_length(item.shape[1])]))
                continue
            match item:
                case (int(row), [*ids]) if len(ids) >= self.ends[row * self.beams]:  # `Allowed`
                    continue
            kept.append(item)
        return kept


# ------------------------------------------------------------------------------------ the command


def attempt(seed: int, model: str | None, number: int) -> tuple[list[Outcome], str]:
    """Outcomes of a case, and an error with the command that repeats it; run in a separate
    process."""
    tools.quieten()
    case = fuzz_cases.draw(seed, number, model)
    try:
        return run_case(case), ""
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return [], f"{case}\n  {kind}{error}"


def summary(outcomes: Sequence[Outcome]) -> str:
    counts = collections.Counter((o.road, o.mode, o.how) for o in outcomes)
    lines = [f"{'road':10} {'mode':12}" + "".join(f"{kind:>15}" for kind in KINDS)]
    for road, mode in sorted({(o.road, o.mode) for o in outcomes}):
        numbers = "".join(f"{counts[road, mode, kind]:15}" for kind in KINDS)
        lines.append(f"{road:10} {mode:12}{numbers}")
    return "\n".join(lines)


def main() -> int:
    model = dict(choices=models.DECODER_ONLY, help="this model in every case")
    options = dict(seed=0, jobs=2, only=int, cases=500, model=model)
    args = tools.parser(__doc__, **options).parse_args()
    start = time.monotonic()
    numbers = range(args.cases) if args.only is None else [args.only]
    if args.only is not None:
        print(fuzz_cases.draw(args.seed, args.only, args.model))
    outcomes: list[Outcome] = []
    num_failed = 0
    work = functools.partial(attempt, args.seed, args.model)
    for number, result in tools.attempts(work, numbers, args.jobs, HANG_SECONDS):
        found, error = ([], result.reason) if isinstance(result, Lost) else result
        outcomes += found
        if error:
            num_failed += 1
            repeat = tools.repeat("fuzz", seed=args.seed, only=number, model=args.model or "")
            print(f"case {number} FAILED: {repeat}\n  {error}", flush=True)
    print(summary(outcomes))
    counts = f"{len(numbers)} cases, {len(outcomes)} calls, {num_failed} failed"
    print(f"{counts}, {time.monotonic() - start:.0f} s")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
