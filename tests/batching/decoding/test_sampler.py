"""The step-wise sampling loop against `model.generate`, and many decodings that advance as one
batch."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    WatermarkingConfig,
)
from transformers.generation import logits_process as known

from hf_paged import compat
from hf_paged.batching.arguments import RequestOptions
from hf_paged.batching.decoding import sampler
from hf_paged.batching.decoding.base import LogitRows
from hf_paged.batching.decoding.prepare import request_decoding
from hf_paged.batching.decoding.sample import RowStreamers, SampleDecoding
from hf_paged.batching.decoding.sampler import sample_step
from hf_paged.batching.decoding.scores import (
    BatchableProcessors,
    are_row_wise,
    argmax,
    narrow_processors,
    process_together,
)
from tests.batching.decoding.driver import (
    drive,
    generate_by_decoding,
    logits_of,
    take_step,
    tokens_of,
)
from tests.support import models

SOME_EOS = list(range(4, 128, 9))  # rows end at different lengths
NEW = 14
SAMPLE = {"do_sample": True, "top_k": 0}

ROW_WISE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[9], [30, 31], [77]]},
    "sequence_bias": {"sequence_bias": [[[11], 2.0], [[40, 41], -3.0]]},
    "min_new_tokens": {"min_new_tokens": 6},
    "min_length": {"min_length": 17},
    "forced_eos": {"forced_eos_token_id": 13},
    "decay": {"exponential_decay_length_penalty": (3, 1.2)},
    "suppress": {"suppress_tokens": [5, 6, 7, 8, 50], "begin_suppress_tokens": [20, 21]},
    "renormalize": {"renormalize_logits": True, "remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "temperature": {**SAMPLE, "temperature": 0.6},
    "top_k": {**SAMPLE, "top_k": 7},
    "top_p": {**SAMPLE, "top_p": 0.8},
    "top_h": {**SAMPLE, "top_h": 0.5},
    "min_p": {**SAMPLE, "min_p": 0.1},
    "typical": {**SAMPLE, "typical_p": 0.7},
    "epsilon": {**SAMPLE, "epsilon_cutoff": 0.02},
    "eta": {**SAMPLE, "eta_cutoff": 0.02},
    "everything": {
        **SAMPLE,
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[9], [30, 31]],
    },
}
NOT_ROW_WISE: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.5},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(4 + row, 128, 3))},
}


def plain_and_decoding(
    inputs: dict[str, Any], model_name: str = "llama", **options: Any
) -> tuple[Any, Any, Any]:
    """Output of `generate`, the output of a decoding, and that decoding."""
    model = models.get(model_name)
    ours = {name: options.pop(name) for name in ("check", "record_logprobs") if name in options}
    again = copy.deepcopy(options)
    options.setdefault("max_new_tokens", NEW)
    again.setdefault("max_new_tokens", NEW)
    torch.manual_seed(7)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(7)
    with generate_by_decoding(model, **ours) as made:
        by_decoding = model.generate(**inputs, **again)
    return plain, by_decoding, made[0]


NEED_EOS = ("decay", "min_new_tokens", "min_length")


@pytest.mark.parametrize(
    ("name", "eos"),
    [
        pytest.param(name, eos, id=f"{name}-{'eos' if eos else 'to_the_end'}")
        for name in (*ROW_WISE, *NOT_ROW_WISE)
        for eos in (None, SOME_EOS)
        if eos or name not in NEED_EOS
    ],
)
def test_tokens_are_those_of_generate(name: str, eos: list[int] | None) -> None:
    options = {**ROW_WISE, **NOT_ROW_WISE}[name]
    left_early: list[int] = []
    plain, ours, decoding = plain_and_decoding(
        models.padded_prompt("llama", (13, 4, 9, 6)),
        eos_token_id=eos,
        check=lambda decoding, advance: left_early.extend(
            advance.finished if decoding.open_rows else []
        ),
        **options,
    )
    assert torch.equal(plain, ours)
    assert bool(left_early) == (eos is not None)
    ends = [
        [i for i, token in enumerate(row) if token in (eos or ())] for row in ours[:, 13:].tolist()
    ]
    assert decoding.lengths == [13 + (places[0] + 1 if places else NEW) for places in ends]
    assert decoding.finish_reasons == ["eos" if places else "length" for places in ends]


@pytest.mark.parametrize("model_name", ["gpt2", "gemma3"])
def test_several_samples_of_each_prompt(model_name: str) -> None:
    inputs = models.padded_prompt(model_name)
    options = {**SAMPLE, "num_return_sequences": 3, "eos_token_id": SOME_EOS}
    plain, ours, decoding = plain_and_decoding(inputs, model_name, **options)
    assert torch.equal(plain, ours) and decoding.num_rows == 9


class BiasFromBatch(LogitsProcessor):
    """A custom processor that keeps state, reads the whole batch and records its inputs."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids)
        self.copies.append(input_ids.clone())
        bias = torch.zeros_like(scores)
        bias[:, int(input_ids[:, -1].sum()) % scores.shape[1]] = 3.0 + len(self.seen)
        scores += bias  # in place, as some processors do
        return scores


class StopAtTotal(StoppingCriteria):
    """A custom criterion: counts its calls, and ends rows whose last tokens sum to a multiple."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return (input_ids[:, -3:].sum(dim=-1) + self.calls) % self.number == 0


@pytest.mark.parametrize("eos", [None, [25, 26, 27]], ids=["no_eos", "eos"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sample"])
def test_processors_and_criteria_of_the_callers_own(eos: list[int] | None, do_sample: bool) -> None:
    runs = [(BiasFromBatch(), StopAtTotal(4)) for _ in range(2)]
    outputs = []
    for (processor, criterion), by_decoding in zip(runs, (False, True)):
        options = dict(
            logits_processor=LogitsProcessorList([processor]), stopping_criteria=[criterion]
        )
        torch.manual_seed(3)
        model, inputs = models.get("llama"), models.padded_prompt("llama", (13, 4, 9, 6))
        keywords = dict(options, do_sample=do_sample, eos_token_id=eos, max_new_tokens=NEW)
        if by_decoding:
            with generate_by_decoding(model) as made:
                outputs.append(model.generate(**inputs, **keywords))
        else:
            outputs.append(model.generate(**inputs, **keywords))
    (plain_processor, plain_criterion), (processor, criterion) = runs
    assert torch.equal(*outputs)
    assert plain_criterion.calls == criterion.calls and len(plain_processor.seen) == len(
        processor.seen
    )
    for theirs, shown, kept in zip(plain_processor.copies, processor.seen, processor.copies):
        assert torch.equal(theirs, shown) and torch.equal(shown, kept) and shown.is_contiguous()
    assert "criteria" in made[0].finish_reasons and not made[0].can_split
    if eos is None:  # transformers continues rows that ended; their lengths show where
        assert len(set(made[0].lengths)) > 1 and max(made[0].lengths) == outputs[1].shape[1]


def test_a_criterion_that_writes_tokens() -> None:
    class Force(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] == 16:
                input_ids[:, -1] = 99
            return torch.zeros(len(input_ids), dtype=torch.bool)

    plain, ours, _ = plain_and_decoding(models.prompt("llama"), stopping_criteria=[Force()])
    assert torch.equal(plain, ours) and (ours[:, 15] == 99).all()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sample"])
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}], ids=["bare", "processed"])
def test_dicts_with_scores_and_logits(do_sample: bool, processors: dict[str, Any]) -> None:
    plain, ours, decoding = plain_and_decoding(
        models.padded_prompt("llama"),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        eos_token_id=SOME_EOS,
        do_sample=do_sample,
        **processors,
    )
    assert type(ours) is type(plain) and ours.keys() | {compat.OUTPUT_CACHE} == plain.keys() | {
        compat.OUTPUT_CACHE
    }
    assert torch.equal(plain.sequences, ours.sequences) and len(set(decoding.lengths)) > 1
    for theirs, mine in ((plain.scores, ours.scores), (plain.logits, ours.logits)):
        assert isinstance(mine, tuple) and len(mine) == len(theirs)
        for a, b in zip(theirs, mine):  # those of ended rows, too
            assert a.shape == b.shape and a.dtype == b.dtype == torch.float32
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert not decoding.can_split, "what a row computes after its end depends on when others end"
    marker = object()
    assert decoding.result(marker).past_key_values is marker


def test_stop_strings() -> None:
    tokenizer, model = models.tokenizer(), models.get("llama")
    inputs = models.padded_prompt("llama", (13, 4, 9, 6))
    text = [tokenizer.decode(row[13:]) for row in model.generate(**inputs, max_new_tokens=NEW)]
    stops = [text[0][8:10], text[2][11:13]]
    plain, ours, decoding = plain_and_decoding(
        inputs, stop_strings=stops, tokenizer=tokenizer, eos_token_id=2
    )
    assert torch.equal(plain, ours)
    assert decoding.finish_reasons[0] == "stop_string" and decoding.lengths[0] < 13 + NEW
    _, unpadded, without_eos = plain_and_decoding(inputs, stop_strings=stops, tokenizer=tokenizer)
    assert without_eos.lengths == decoding.lengths and unpadded.shape[1] == max(decoding.lengths)
    assert decoding.can_split and not without_eos.can_split


class Recorder:
    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends and value.device.type == "cpu"
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


def test_a_streamer_of_the_batch() -> None:
    options = dict(eos_token_id=SOME_EOS, max_new_tokens=NEW)
    model, inputs = models.get("llama"), models.padded_prompt("llama")
    theirs, ours = Recorder(), Recorder()
    model.generate(**inputs, streamer=theirs, **options)
    with generate_by_decoding(model) as made:
        model.generate(**inputs, streamer=ours, **options)
    assert ours.values == theirs.values and ours.ends == theirs.ends == 1 and not made[0].can_split


def test_a_streamer_for_each_row() -> None:
    streamers = [Recorder() for _ in range(3)]
    model, inputs = models.get("llama"), models.padded_prompt("llama")
    with generate_by_decoding(model) as made:
        ours = model.generate(
            **inputs, streamer=RowStreamers(streamers), eos_token_id=SOME_EOS, max_new_tokens=NEW
        )
    (decoding,) = made
    assert len({decoding.lengths[0], decoding.lengths[2]}) == 2
    for row, streamer in enumerate(streamers):
        assert (
            streamer.ends == 1
            and streamer.values.pop(0) == inputs["input_ids"][row : row + 1].tolist()
        )
        assert streamer.values == [
            [token] for token in ours[row, 13 : decoding.lengths[row]].tolist()
        ]


@pytest.mark.parametrize(
    "processors", [{}, {"repetition_penalty": 1.3, "temperature": 0.7}], ids=["bare", "processed"]
)
def test_logprobs(processors: dict[str, Any]) -> None:
    plain, _, decoding = plain_and_decoding(
        models.padded_prompt("llama"),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        record_logprobs=True,
        eos_token_id=SOME_EOS,
        do_sample=True,
        **processors,
    )
    for row, length in enumerate(decoding.lengths):
        assert len(decoding.records[row]) == length - 13
        for step, (pair, _) in enumerate(decoding.records[row]):
            token = plain.sequences[row, 13 + step]
            expected = [
                kept[step][row].log_softmax(-1)[token] for kept in (plain.logits, plain.scores)
            ]
            torch.testing.assert_close(
                torch.tensor(pair), torch.stack(expected), atol=1e-4, rtol=1e-4
            )


# -- splitting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("name", [name for name in ROW_WISE if not ROW_WISE[name].get("do_sample")])
def test_split_rows_end_as_they_would_together(name: str, after: int) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (13, 4, 9, 6))
    options = dict(ROW_WISE[name], eos_token_id=SOME_EOS, max_new_tokens=NEW)
    options |= dict(return_dict_in_generate=True)

    def split(decoding: SampleDecoding, mask: torch.Tensor) -> SampleDecoding:
        for _ in range(after):
            rows = decoding.open_rows
            take_step(decoding, logits_of(model, decoding.input_ids[rows], mask[rows]))
        assert decoding.can_split
        parts = decoding.split()
        assert [part.num_rows for part in parts] == [1] * 4
        for row in (2, 0, 3, 1):
            drive(parts[row], model, mask[row : row + 1])
        return decoding.join(parts)

    whole = model.generate(**inputs, **copy.deepcopy(options))
    with generate_by_decoding(model, split=split) as made:
        joined = model.generate(**inputs, **options)
    assert torch.equal(whole.sequences, joined.sequences) and made[0].is_done
    assert len(set(made[0].lengths)) > 1 and set(made[0].finish_reasons) <= {"eos", "length"}


@pytest.mark.parametrize("name", NOT_ROW_WISE)
def test_what_depends_on_other_rows_is_not_split(name: str) -> None:
    _, _, decoding = plain_and_decoding(
        models.prompt("llama"), eos_token_id=2, **NOT_ROW_WISE[name]
    )
    assert not decoding.can_split
    with pytest.raises(ValueError, match="depend on one another"):
        decoding.split()


def test_rows_that_may_end_need_padding() -> None:
    class OwnEos(StoppingCriteria):
        eos_token_id = 5

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids[:, -1] == 5

    model = models.build("llama")
    model.generation_config.pad_token_id = None
    with generate_by_decoding(model), pytest.raises(ValueError, match="pad_token_id"):
        model.generate(**models.prompt("llama"), stopping_criteria=[OwnEos()], max_new_tokens=3)


# -- one request ---------------------------------------------------------------------------------


def request(prompt: list[int], model_name: str = "llama", **options: Any) -> Any:
    ours = {
        field.name: options.pop(field.name)
        for field in fields(RequestOptions)
        if field.name in options
    }
    tokenizer = options.pop("tokenizer", None)
    config = GenerationConfig(**{"max_new_tokens": NEW, **options})
    return request_decoding(
        models.get(model_name), prompt, config, RequestOptions(**ours), tokenizer
    )[0]


@pytest.mark.parametrize("name", ROW_WISE)
def test_a_request_is_generate_on_its_prompt(name: str) -> None:
    model, prompt = models.get("llama"), models.token_ids(1, 11)
    before = model.generation_config.to_dict()
    options = dict(ROW_WISE[name], eos_token_id=[7, 60])
    torch.manual_seed(5)
    plain = model.generate(
        prompt, generation_config=GenerationConfig(**options, max_new_tokens=NEW)
    )
    seed = 5 if options.get("do_sample") else None
    decoding = request(prompt[0].tolist(), seed=seed, **options)
    assert decoding.max_length == 11 + NEW
    assert torch.equal(drive(decoding, model).result(), plain)
    assert model.generation_config.to_dict() == before


def test_a_request_takes_the_models_defaults() -> None:
    model = models.build("llama")
    model.generation_config.update(
        do_sample=True, temperature=0.3, num_return_sequences=2, max_length=17
    )
    prompt = models.token_ids(1, 11)
    torch.manual_seed(5)
    plain = model.generate(prompt)
    decoding, _ = request_decoding(model, prompt[0].tolist(), None, RequestOptions(seed=5))
    assert decoding.num_rows == 2 and torch.equal(drive(decoding, model).result(), plain)


def test_the_streamer_of_a_request_gets_the_new_tokens() -> None:
    theirs, ours = Recorder(), Recorder()
    model, prompt = models.get("llama"), models.token_ids(1, 5)
    model.generate(prompt, streamer=theirs, max_new_tokens=4)
    drive(request(prompt[0].tolist(), streamer=ours, max_new_tokens=4), model)
    # the engine passes the prompt itself
    assert ours.values == theirs.values[1:] and ours.ends == 1


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ([5, 128], {}, "token id 128 .* 0 to 127"),
        ([5, -1], {}, "token id -1"),
        ([5], {"num_return_sequences": 2}, "num_return_sequences"),
        ([5], {"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
        ([5], {"num_beams": 2, "streamer": Recorder()}, "streamer"),
        ([5], {"penalty_alpha": 0.5, "top_k": 4}, "contrastive_search"),
        ([5], {"prompt_lookup_num_tokens": 3, "num_beams": 2}, "leave the assistant out"),
        ([5] * 9, {"max_length": 9, "max_new_tokens": None}, "max_length"),
        ([5], {"stop_strings": ["a"]}, "tokenizer"),
        ([5], {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ],
)
def test_requests_that_cannot_be_served(
    prompt: list[int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        request(prompt, **options)


# -- many decodings at once ----------------------------------------------------------------------

PROMPT_LENGTHS = (11, 3, 7, 5, 9, 4)


def step_together(decodings: list[Any], model: Any) -> list[Any]:
    """One step of the open decodings, whose logits are rows of one tensor."""
    rows = [logits_of(model, decoding.input_ids[decoding.open_rows]) for decoding in decodings]
    together, ready, start = torch.cat(rows), [], 0
    for decoding, own in zip(decodings, rows):
        ready.append((decoding, LogitRows(together, start, start + len(own))))
        start += len(own)
    return sample_step(ready)


def rows_of(logits: torch.Tensor) -> list[LogitRows]:
    """Each row."""
    return [LogitRows(logits, row, row + 1) for row in range(len(logits))]


def prompts() -> list[list[int]]:
    return [models.token_ids(1, n, seed=n)[0].tolist() for n in PROMPT_LENGTHS]


MIXED: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"eos_token_id": SOME_EOS}] * 6,
    "lengths": [{"max_new_tokens": n} for n in (1, 2, 5, 9, 14, 3)],
    "temperatures": [{**SAMPLE, "temperature": t} for t in (0.5, 0.7, 0.7, 1.0, 1.3, 2.0)],
    "top_k": [{"do_sample": True, "top_k": k} for k in (1, 5, 50, 500, 7, 7)],
    "top_p": [{**SAMPLE, "top_p": p} for p in (0.1, 0.5, 0.9, 0.95, 0.99, 0.3)],
    "min_p": [{**SAMPLE, "min_p": p} for p in (0.01, 0.05, 0.1, 0.2, 0.4, 0.05)],
    "stack": [
        {"do_sample": True, "top_k": 30, "top_p": 0.9, "temperature": t, "min_p": 0.01}
        for t in (0.5, 1.5)
    ]
    * 3,
    "others": [
        {**SAMPLE, **extra} for extra in ({"typical_p": 0.5}, {"eta_cutoff": 0.02}, {"top_h": 0.4})
    ]
    * 2,
    "min_new": [{"min_new_tokens": n, "eos_token_id": SOME_EOS} for n in (1, 2, 4, 6, 8, 12)],
    "repetition": [
        {
            "do_sample": True,
            "repetition_penalty": p,
            "top_p": 0.9,
            "min_new_tokens": 3,
            "eos_token_id": SOME_EOS,
        }
        for p in (1.1, 1.1, 1.5, 0.8, 2.0, 1.3)
    ],
    "modes": [
        {},
        {"do_sample": True},
        {"num_beams": 3, "eos_token_id": SOME_EOS},
        {"do_sample": True, "num_return_sequences": 3, "eos_token_id": SOME_EOS},
        {"repetition_penalty": 1.3},
        {"num_beams": 2, "do_sample": True},
    ],
}


@pytest.mark.parametrize("name", MIXED)
def test_decodings_that_share_steps_stay_what_they_are_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.get("llama")
    batches: list[int] = []
    monkeypatch.setattr(
        sampler,
        "process_together",
        lambda scores, members: batches.append(len(members)) or process_together(scores, members),
    )

    def made() -> list[Any]:
        return [
            request(prompt, seed=i, return_logprobs=True, **options)
            for i, (prompt, options) in enumerate(zip(prompts(), MIXED[name]))
        ]

    alone = [drive(decoding, model) for decoding in made()]
    decodings = made()
    while running := [decoding for decoding in decodings if not decoding.is_done]:
        for result in step_together(running, model):
            tokens_of(result)
    assert name == "modes" or max(batches) > 1  # some forwards were shared
    for one, other in zip(alone, decodings):
        assert torch.equal(one.result(), other.result())
        assert one.finish_reasons == other.finish_reasons and one.lengths == other.lengths
        pairs = [[pair for pair, _ in decoding.records[0]] for decoding in (one, other)]
        torch.testing.assert_close(torch.tensor(pairs[0]), torch.tensor(pairs[1]))


def test_stop_strings_of_many_requests() -> None:
    model, tokenizer = models.get("llama"), models.tokenizer()
    texts = [
        tokenizer.decode(drive(request(prompt), model).input_ids[0, len(prompt) :])
        for prompt in prompts()
    ]
    stops = [
        [texts[0][5:7]],
        [texts[0][5:7]],
        [texts[2][4:7]],
        [texts[3][9:12], 40 * "q"],
        ["zz"],
        [texts[5][2]],
    ]
    alone, shared = (
        [request(p, stop_strings=s, tokenizer=tokenizer) for p, s in zip(prompts(), stops)]
        for _ in range(2)
    )
    for decoding in alone:
        drive(decoding, model)
    while running := [decoding for decoding in shared if not decoding.is_done]:
        step_together(running, model)
    assert [d.finish_reasons for d in shared] == [d.finish_reasons for d in alone]
    assert [d.lengths for d in shared] == [d.lengths for d in alone]
    assert sum(d.finish_reasons == ["stop_string"] for d in shared) >= 4


class Failing:
    """A processor, criterion or streamer that raises at the third call."""

    def __init__(self) -> None:
        self.calls = 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls == 3:
            raise KeyError("on purpose")

    def put(self, value: Any) -> None:
        self._count()

    def end(self) -> None: ...


class FailingProcessor(Failing, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._count()
        return scores


class FailingCriterion(Failing, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sample"])
def test_an_exception_stays_with_its_decoding(do_sample: bool) -> None:
    model = models.get("llama")
    faults: list[dict[str, Any]] = [
        {},
        {"logits_processor": [FailingProcessor()]},
        {},
        {"stopping_criteria": [FailingCriterion()]},
        {"streamer": Failing()},
        {},
    ]

    def made(i: int, **options: Any) -> Any:
        return request(prompts()[i], seed=i, do_sample=do_sample, **options)

    decodings = [made(i, **options) for i, options in enumerate(faults)]
    failed: dict[int, int] = {}
    for step in range(NEW):
        running = [i for i in range(6) if i not in failed]
        for i, advance in zip(running, step_together([decodings[i] for i in running], model)):
            if isinstance(advance, Exception):
                assert isinstance(advance, KeyError)
                failed[i] = step
    assert failed == {1: 2, 3: 2, 4: 2}
    for i in (0, 2, 5):
        assert torch.equal(decodings[i].result(), drive(made(i), model).result())


def test_logits_that_are_not_numbers_fail_alone() -> None:
    decodings = [request(prompt, do_sample=True) for prompt in prompts()]
    seeded = [request(prompt, do_sample=True, seed=0) for prompt in prompts()]
    logits = torch.randn(12, 128)
    logits[[3, 8]] = float("nan")
    results = sample_step(list(zip([*decodings, *seeded], rows_of(logits))))
    assert [i for i, result in enumerate(results) if isinstance(result, Exception)] == [3, 8]


@pytest.mark.slow
def test_draws_without_a_generator_follow_the_probabilities() -> None:
    # 4,000 draws: counts stay within five standard deviations, and tokens without probability are
    # never drawn
    probs = torch.zeros(1000)
    probs[[3, 200, 201, 700, 999]] = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    decodings = [request([5], **SAMPLE) for _ in range(4000)]
    results = sample_step([(decoding, LogitRows.of(probs.log()[None])) for decoding in decodings])
    counts = torch.tensor([tokens_of(result)[0] for result in results]).bincount(minlength=1000)
    assert ((counts - 4000 * probs).abs() <= 5 * (4000 * probs * (1 - probs)).sqrt()).all()


def test_a_generator_draws_as_multinomial_does() -> None:
    logits = torch.randn(40, 128)
    decodings = [request([5], seed=i, **SAMPLE) for i in range(40)]
    results = sample_step(list(zip(decodings, rows_of(logits))))
    for i, result in enumerate(results):
        expected = torch.multinomial(
            logits[i : i + 1].softmax(-1), 1, generator=torch.Generator().manual_seed(i)
        )
        assert tokens_of(result) == [int(expected)]


def test_scores_that_cannot_come_to_the_host_fail_alone() -> None:
    def nowhere(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.to("meta")

    logits = torch.randn(3, 128)
    decodings = [
        request([5]),
        request([5], logits_processor=[nowhere]),
        request([6], do_sample=True, seed=1),
    ]
    first, second, third = sample_step(list(zip(decodings, rows_of(logits))))
    assert isinstance(second, NotImplementedError) and tokens_of(third)
    assert tokens_of(first) == [int(logits[0].argmax())]


def test_logits_that_do_not_lie_in_one_tensor() -> None:
    decodings = [request(prompt) for prompt in prompts()]
    logits = torch.randn(12, 128)
    scattered = [logits[[i]] if i % 2 else logits[2 * i : 2 * i + 1] for i in range(6)]
    results = sample_step(list(zip(decodings, map(LogitRows.of, scattered))))
    assert list(map(tokens_of, results)) == [part.argmax(-1).tolist() for part in scattered]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (known.TemperatureLogitsWarper, (0.1, 0.7, 1.0, 3.0)),
        (known.TopKLogitsWarper, (1, 2, 50, 4000)),
        (known.TopPLogitsWarper, (0.0, 0.2, 0.9, 0.999)),
        (known.MinPLogitsWarper, (0.0, 0.001, 0.3, 1.0)),
    ],
)
@pytest.mark.parametrize("vocab", [37, 1031])
def test_one_number_a_row_is_transformers_formula(
    kind: Any, values: tuple[Any, ...], vocab: int
) -> None:
    scores = torch.randn(4, vocab) * 3
    scores[2, ::3] = float("-inf")
    scores[3, 5:20] = scores[3, 4]
    processors = [LogitsProcessorList([kind(value)]) for value in values]
    shareables = [BatchableProcessors.of(own, torch.zeros((1, 0))) for own in processors]
    members = [shareable for shareable in shareables if shareable is not None]
    assert len({member.key for member in members}) == 1
    expected = torch.cat([own(None, row) for own, row in zip(processors, scores.split(1))])
    assert torch.equal(process_together(scores, members), expected)


def test_processors_that_hold_a_value_for_each_row() -> None:
    ids, scores = models.token_ids(6, 10), torch.randn(6, 128)
    processors = LogitsProcessorList(
        [
            known.EncoderRepetitionPenaltyLogitsProcessor(1.5, models.token_ids(6, 8, seed=1)),
            known.EncoderNoRepeatNGramLogitsProcessor(1, models.token_ids(2, 8, seed=2)),
        ]
    )
    try:
        processors.append(
            known.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([0, 2, 4, 6, 8, 9]))
        )
    except ValueError:
        pass  # older transformers accept only one number for all rows
    rows = [4, 1, 3]
    assert are_row_wise(processors, 6) and not are_row_wise(processors, 12)
    assert torch.equal(
        narrow_processors(processors, rows, 6)(ids[rows], scores[rows]),
        processors(ids, scores)[rows],
    )


@pytest.mark.parametrize("vocab", [5, 1024, 1025, 3000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_of_equals(vocab: int, dtype: torch.dtype) -> None:
    scores = torch.randn(9, vocab).to(dtype)
    scores[1] = float("-inf")
    scores[2, [2, vocab - 1]] = 100
    scores[3, vocab - 1] = 100
    scores[4, [1, vocab // 2]] = float("nan")
    scores[5] = 3.0
    assert torch.equal(argmax(scores), scores.argmax(dim=-1))
