"""Every generative architecture of transformers, tiny and random: does `"paged"` give plain
`generate`'s tokens?

    python -m tests.support.architectures [--only REGEX] [--json PATH] [--jobs N]

`check(name)` checks one class. An architecture that cannot be built here, or that plain `generate`
does not serve, is listed with the reason and does not count as a failure of the paged cache.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import re
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import hf_paged
from benchmarks import machine, report
from benchmarks.sections import architectures as sections
from tests.support import tools
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.architecture_media import NOT_GIVEN, media_rows
from tests.support.checks import attention_of
from tests.support.engine_helpers import tokens_of
from tests.support.tools import describe
from tests.support.workers import Lost

# name in the table: mapping in `modeling_auto`; a class counts for the first family that has it
FAMILIES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
}
# tokens; equal to the sliding window of the tiny models, and below every sequence checked
BLOCK_SIZE = 8
SECONDS_PER_ARCHITECTURE = 120.0
END_TOKENS = list(range(100, 112))  # many, so that some rows end before the others
ONLY = "", "regular expression on the class name, any case"  # an option
TEXT = ("input_ids", "attention_mask")
# in standard deviations of the logits; another summation order in float32 stays far below
LOGITS_TOLERANCE = 1e-3

_GREEDY = {"do_sample": False, "num_beams": 1}
_ENDING = {"eos_token_id": END_TOKENS, "max_new_tokens": 14, "num_return_sequences": 2}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {**_GREEDY, "max_new_tokens": 18, "min_new_tokens": 18},
    "logits": {
        **{**_GREEDY, "max_new_tokens": 12, "min_new_tokens": 12},
        **{"output_logits": True, "return_dict_in_generate": True},
    },
    "beams": {"do_sample": False, "num_beams": 3, **_ENDING},
    "sample": {"do_sample": True, "num_beams": 1, **_ENDING},
}
# enough steps to record
LONG = {**_GREEDY, "max_new_tokens": 80, "min_new_tokens": 80}
OTHER_INPUTS = ("text", "video", "audio")  # more modes: greedy with the media not used above
# three requests of an engine, greedy
REQUESTS = tuple(f"{medium} requests" for medium in ("image", "video", "audio"))


@dataclasses.dataclass
class ModeResult:
    """One kind of `generate` call; `status` is equal, different, error, not served or not
    deterministic."""

    status: str
    detail: str = ""
    road: str = ""

    def __str__(self) -> str:
        return f"{self.status}, {self.road}" if self.road else self.status


@dataclasses.dataclass
class Result:
    """One architecture; `status` is equal, different, error, plain fails or cannot build."""

    name: str
    family: str
    status: str
    detail: str = ""
    modes: dict[str, ModeResult] = dataclasses.field(default_factory=dict)
    road: str = ""  # of the greedy call, as are the next three
    reason: str = ""
    in_place: bool | None = None  # None: not reported
    latent: bool | None = None
    replayed: int = 0  # replayed decode steps of a longer call
    medium: str = "text"  # of the four modes: image, video, audio, protein or text
    # tensor inputs beside ids and masks
    inputs: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


@functools.cache
def _families() -> dict[str, str]:
    found: dict[str, str] = {}
    for family, mapping in FAMILIES.items():
        for names in getattr(modeling_auto, mapping, {}).values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, family)
    return found


def list_architectures(family: str | None = None, pattern: str = "") -> list[str]:
    """The model classes to check, each once; of one family, or with a name like this, if given."""
    matches = re.compile(pattern, re.IGNORECASE).search
    return [name for name, own in _families().items() if family in (None, own) and matches(name)]


def check(name: str, device: str = "cpu", modes: Collection[str] = MODES, **changes: Any) -> Result:
    """Builds a tiny model of class `name` and compares plain with paged `generate`: in these modes,
    and with all media and as requests if they are all modes. `changes`: of its config."""
    started = time.perf_counter()
    result = Result(name, _families().get(name, "other"), "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _check(result, device, modes, changes)
        except Exception as error:
            result.status, result.detail = "error", describe(error)
    gc.collect()
    result.seconds = round(time.perf_counter() - started, 2)
    return result


def _check(result: Result, device: str, modes: Collection[str], changes: dict[str, Any]) -> None:
    try:
        model = tiny_model(getattr(transformers, result.name), **changes)
        (result.medium, inputs), *others = _on(device, make_inputs(model)).items()
    except Exception as error:
        result.status, result.detail = "cannot build", describe(error)
        return
    has_all = len(modes) == len(MODES)
    result.inputs = sorted(
        name for name, x in _media(inputs).items() if isinstance(x, torch.Tensor)
    )
    other_media = {}
    if result.medium != "text":
        other_media = _media(_on(device, make_inputs(model, seed=2))[result.medium])
    requests = _on(device, media_rows(model)) if has_all else {}
    model.to(device)
    if problem := _problem_of_plain(model, inputs, other_media, result.medium):
        result.status, result.detail = "plain fails", problem
        return
    for mode in modes:
        result.modes[mode] = _check_mode(model, inputs, mode, result)
    if has_all:
        for medium, given in others:
            result.modes[medium] = _check_mode(model, given, medium, result)
        if result.road == "engine":
            result.modes["long"] = _check_mode(model, inputs, "long", result)
            result.replayed = _route(model).num_captured_steps or 0
        for medium, rows in requests.items():
            result.modes[f"{medium} requests"] = _check_requests(model, rows)
    statuses = {mode.status for mode in result.modes.values()}
    result.status = next((s for s in ("error", "different") if s in statuses), "equal")
    result.detail = "; ".join(f"{name}: {m.detail}" for name, m in result.modes.items() if m.detail)


def _media(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in inputs.items() if name not in TEXT}


def _on(device: str, inputs: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)


def _problem_of_plain(
    model: PreTrainedModel, inputs: dict[str, Any], others: dict[str, Any], medium: str
) -> str:
    """Why plain `generate` cannot serve as a reference; empty if it can. `others`: another picture,
    clip or sound."""

    def outputs(mode: str, *given: dict[str, Any]) -> list[Any]:
        return [_generate(model, x, mode, paged=False) for x in given]

    try:
        if difference(*outputs("greedy", inputs, inputs)):
            return "not deterministic"
        if others and not difference(*outputs("logits", inputs, {**inputs, **others})):
            return f"another {medium} gives the same logits"
    except Exception as error:
        return describe(error)
    return ""


def _check_mode(
    model: PreTrainedModel, inputs: dict[str, Any], mode: str, result: Result
) -> ModeResult:
    try:
        expected = _generate(model, inputs, mode, paged=False)
    except Exception as error:
        return ModeResult("not served", describe(error))
    before = attention_of(model)
    try:
        found = _generate(model, inputs, mode, paged=True)
    except Exception as error:
        return ModeResult("error", describe(error), _route(model).road)
    route = _route(model)
    if mode == "greedy":
        result.road, result.reason = route.road, route.reason
        result.in_place, result.latent = route.in_place, route.latent
    if gap := difference(expected, found):
        if difference(expected, _generate(model, inputs, mode, paged=False)):
            return ModeResult("not deterministic", "plain differs from itself", route.road)
        return ModeResult("different", gap, route.road)
    problem = ""
    if (after := attention_of(model)) != before:
        problem = f"attention left as {after}, was {before}"
    try:
        hf_paged.check_integrity(model)
    except Exception as error:
        problem = f"check_integrity: {describe(error)}"
    return ModeResult("error" if problem else "equal", problem, route.road)


def _route(model: PreTrainedModel) -> Any:
    """Of the last call; without one where the class has a `generate` of its own."""
    nothing = dict(road="", reason="", in_place=None, latent=None, num_captured_steps=0)
    return hf_paged.last_route(model) or SimpleNamespace(**nothing)


def _check_requests(model: PreTrainedModel, rows: list[dict[str, Any]]) -> ModeResult:
    """Compares rows, added to an engine before its first step, with each row alone."""
    options = MODES["greedy"]
    try:
        outputs = [_tokens(_generate(model, row, "greedy", paged=False)) for row in rows]
    except Exception as error:
        return ModeResult("not served", describe(error))
    expected = [output[0, -options["max_new_tokens"] :].tolist() for output in outputs]
    try:
        with hf_paged.PagedEngine(model, {"block_size": BLOCK_SIZE}) as engine:
            results = engine.generate(rows, options)
            road = engine.route.road if engine.route else ""
            found = [row for (row,) in tokens_of(results)]
            engine.check_integrity()
    except Exception as error:
        is_refused = isinstance(error, ValueError) and re.search(
            r"`generate`|model\.generate\(", str(error)
        )
        return ModeResult("refused" if is_refused else "error", describe(error))
    return ModeResult("equal" if found == expected else "different", "", road)


def _generate(model: PreTrainedModel, inputs: dict[str, Any], mode: str, paged: bool) -> Any:
    arguments = copy.deepcopy(inputs)  # `generate` may write to them
    arguments |= LONG if mode == "long" else MODES["greedy" if mode in OTHER_INPUTS else mode]
    if paged:
        hf_paged.install()
        arguments |= {"cache_implementation": "paged", "cache_config": {"block_size": BLOCK_SIZE}}
    torch.manual_seed(7)
    return model.generate(**arguments)


def _tokens(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    sequences = getattr(output, "sequences", None)
    return _tokens(sequences if sequences is not None else output[0])


def difference(expected: Any, found: Any) -> str:
    """The difference between two outputs of `generate`; empty if there is none."""
    a, b = _tokens(expected), _tokens(found)
    if a.shape != b.shape:
        return f"shape {tuple(b.shape)}, plain {tuple(a.shape)}"
    if not torch.equal(a, b):
        row, position = (a != b).nonzero()[0].tolist()[:2]
        return (
            f"{int((a != b).sum())} of {a.numel()} tokens differ, first in row {row} at {position}"
        )
    logits, other = getattr(expected, "logits", None), getattr(found, "logits", None)
    if isinstance(logits, tuple) and isinstance(other, tuple):
        gaps = [_gap(x, y) for x, y in zip(logits, other, strict=True)]
        if max(gaps) > LOGITS_TOLERANCE:
            first = next(step for step, gap in enumerate(gaps) if gap > LOGITS_TOLERANCE)
            return f"logits {max(gaps):.1e} standard deviations apart, first at step {first}"
    return ""


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of two `(rows, vocab)` logits in standard deviations; NaN and infinities
    must match."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a[a.isfinite()], b[b.isfinite()]
    return float((a - b).abs().max() / a.std().clamp_min(1e-6)) if a.numel() > 1 else 0.0


def sweep(names: list[str], jobs: int, seconds: float = SECONDS_PER_ARCHITECTURE) -> list[Result]:
    """Checks `names` in `jobs` processes; a process that crashes or exceeds `seconds` loses only
    its current result."""

    found = dict(tools.swept(_check_quietly, names, jobs, seconds))
    lost = {
        name: Result(name, _families()[name], "error", result.reason)
        for name, result in found.items()
        if isinstance(result, Lost)
    }
    return [(found | lost)[name] for name in names]


def _check_quietly(name: str) -> Result:
    with tools.quietly():
        return check(name)


def table(results: list[Result]) -> str:
    first, last = ("name", "family", "medium", "status"), ("in_place", "latent", "seconds")
    rows = []
    for result in results:
        fields = {**vars(result), "detail": "; ".join(filter(None, (result.detail, result.reason)))}
        statuses = {mode: found.status for mode, found in result.modes.items() if mode in MODES}
        rows.append(fields | {mode: str(found) for mode, found in result.modes.items()} | statuses)
    columns = [*first, *MODES, "road", *OTHER_INPUTS, *REQUESTS, *last, "detail"]
    return report.markdown(rows, {column: column.replace("_", " ") for column in columns})


def main() -> int:
    options = tools.parser(__doc__, jobs=2, only=ONLY, json=Path).parse_args()
    names = list_architectures(pattern=options.only)
    head = {"command": "python -m tests.support.architectures", "facts": machine.facts()}
    results = sweep(names, options.jobs)
    rows = [dataclasses.asdict(result) for result in results]
    print(table(results), sections.architectures({**head, "results": rows}, NOT_GIVEN), sep="\n\n")
    for mode in (*MODES, "long", *OTHER_INPUTS, *REQUESTS):
        found = (result.modes[mode].status for result in results if mode in result.modes)
        print(f"- {mode}: {sections.counted(found)}")
    statuses = [result.status for result in results]
    print(f"{len(results)} classes, {statuses.count('equal')} equal: {sections.counted(statuses)}")
    if options.json:
        tools.write_results(options.json, head, results)
    return int(any(status in ("different", "error") for status in statuses))


if __name__ == "__main__":
    raise SystemExit(main())
