"""Requests constrained by a schema, a regular expression or a grammar, beside unconstrained
ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("xgrammar")

import hf_paged
from hf_paged.batching.arguments import RequestOptions
from hf_paged.grammar import GrammarCompiler, NoTokenError
from tests.support import models
from tests.support.engine_helpers import engine_of, prompts, run_all
from tests.support.models import BOS, EOS, PAD, get

from .served_app import characters

GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": EOS}
REGEX = r"(yes|no), [a-d]{2,5}!"
GRAMMAR = 'root ::= "<" item ("," item)* ">"\nitem ::= [0-9] [0-9]?'
ASKED = {"regex": (REGEX, REGEX), "grammar": (GRAMMAR, r"<\d\d?(,\d\d?)*>")}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "samples": {**GREEDY, "do_sample": True, "num_return_sequences": 3, "temperature": 2.0},
    "beams": {**GREEDY, "num_beams": 4, "num_return_sequences": 3},
    "penalty": {**GREEDY, "repetition_penalty": 1.3, "do_sample": True, "top_k": 5},
}
TOKENIZER = characters(100)


@pytest.fixture
def engine() -> Iterator[hf_paged.PagedEngine]:
    with engine_of(tokenizer=TOKENIZER) as engine:
        yield engine
        engine.check_integrity()


def _plain(model: Any, prompt: list[int], options: dict[str, Any], **asked: str) -> models.Rows:
    """Rows of plain `generate` with our processor, which is a transformers `LogitsProcessor`."""
    processor = GrammarCompiler().processor(RequestOptions(**asked), TOKENIZER, model)
    assert processor is not None
    processor.set_stop_tokens(torch.tensor([EOS]))
    torch.manual_seed(7)
    ids = torch.tensor([prompt])
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    rows = model.generate(ids, **options, logits_processor=[processor])[:, start:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@pytest.mark.slow_cases(but=["llama-*"])
@pytest.mark.parametrize("kind", sorted(ASKED))
@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "t5"])
def test_as_plain_and_as_asked(name: str, mode: str, kind: str) -> None:
    model, options, (prompt, *others) = get(name), MODES[mode], prompts(14, 9, 10, 11)
    value, pattern = ASKED[kind]
    with engine_of(name, TOKENIZER) as engine:
        alone = [result.token_ids for result in engine.generate(others, GREEDY)]
        ids = [engine.add_request(other, GREEDY) for other in others]
        engine.add_request(prompt, options, seed=7, request_id="r", **{kind: value})
        results = run_all(engine)
    assert [results[each].token_ids for each in ids] == alone
    result = results["r"]
    assert result.error is None
    rows = [sequence.token_ids for sequence in result.sequences]
    assert rows == _plain(model, prompt, options, **{kind: value})
    texts = [sequence.text for sequence in result.sequences if sequence.finish_reason == "eos"]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert texts or kind == "grammar"


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_go_on(preemption: str) -> None:
    options = {**MODES["samples"], "max_new_tokens": 30}
    runs = []
    for config in ({}, {"num_blocks": 20, "preemption": preemption}):
        with engine_of(tokenizer=TOKENIZER, **config) as engine:
            ids = [
                engine.add_request(prompt, options, seed=i, regex="([a-z ]{3} ){3,12}")
                for i, prompt in enumerate(prompts(20, 20, 20, 20, 20))
            ]
            results = run_all(engine)
            assert bool(engine.stats().num_preemptions) == bool(config)
        runs.append([[sequence.token_ids for sequence in results[name].sequences] for name in ids])
    assert runs[0] == runs[1]


def test_schema(engine: hf_paged.PagedEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
        "required": ["ok", "size"],
    }
    options = {**GREEDY, "max_new_tokens": 80, "do_sample": True}
    results = engine.generate(prompts(9, 9, 9, 9, 9, 9), options, schema=schema)
    compiler = engine._core.grammars._compiler
    engine.generate(["text"], options, schema=json.dumps(schema))
    assert engine._core.grammars._compiler is compiler
    found = [json.loads(result.text) for result in results if result.finish_reason == "eos"]
    assert found and not [result.error for result in results if result.error]
    for each in found:
        assert set(each) == {"ok", "size"} and isinstance(each["ok"], bool)


def test_rows_leave_when_their_text_ends(engine: hf_paged.PagedEngine) -> None:
    """No forward could compute their padding."""
    options = {**MODES["samples"], "num_return_sequences": 8, "pad_token_id": -1}
    (result,) = engine.generate([[5, 6]], options, regex="[a-d]{1,30}", seed=0)
    assert result.error is None, result.error
    lengths = [len(sequence.token_ids) for sequence in result.sequences]
    assert min(lengths) < max(lengths)
    assert engine.stats().num_generated_tokens == sum(lengths)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        # the caller's processor runs before the mask: a choice of the second best is kept
        ({}, {"logits_processor": [lambda ids, scores: scores * -1]}),
        # a negative EOS is none: the other one alone ends the text
        ({"eos_token_id": [-1, EOS]}, {}),
    ],
    ids=["processor", "negative EOS"],
)
def test_what_a_request_may_have_beside(
    options: dict[str, Any], arguments: dict[str, Any], engine: hf_paged.PagedEngine
) -> None:
    (result,) = engine.generate([[5, 6]], {**GREEDY, **options}, regex="abc", **arguments)
    assert result.error is None, result.error
    assert result.text == "abc" and result.finish_reason == "eos"


def test_a_vocabulary_that_cannot_say_it() -> None:
    with engine_of(tokenizer=models.tokenizer()) as engine:
        results = engine.generate(["x", "y"], GREEDY, regex="no, thanks")
        assert all("lacks a character" in str(result.error) for result in results)
        assert engine.generate(["x"], GREEDY)[0].error is None
        engine.check_integrity()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sample"])
@pytest.mark.parametrize("source", ["early_exit", "other_tokens"])
def test_drafts_of_transformers_generators_keep_the_constraint(
    source: str, do_sample: bool, engine: hf_paged.PagedEngine
) -> None:
    # the assistant reads fewer tokens: its text lacks the first one
    prompt = [BOS, *prompts(14)[0]]
    config: dict[str, Any] = {**GREEDY, "do_sample": do_sample}
    drafting: dict[str, Any] = {"generation_config": {**config, "assistant_early_exit": 1}}
    if source == "other_tokens":
        other = models.build("llama", seed=3, vocab_size=models.VOCAB_SIZE + 8)
        drafting = {"generation_config": config, "assistant_model": other}
        drafting["assistant_tokenizer"] = models.tokenizer()
    (alone,) = engine.generate([prompt], config, seed=7, regex=REGEX)
    (result,) = engine.generate([prompt], **drafting, seed=7, regex=REGEX)
    assert result.error is None and result.num_draft_tokens > 0
    assert result.finish_reason == "eos" and re.fullmatch(REGEX, str(result.text)), result.text
    assert do_sample or result.token_ids == alone.token_ids


def test_a_processor_that_also_reads_drafts_keeps_the_constraint() -> None:
    """As one that a caller passes on to other loops. A text that has ended stays ended."""
    processor = GrammarCompiler().processor(RequestOptions(regex="abc"), TOKENIZER, get("llama"))
    processor.set_stop_tokens(torch.tensor([EOS]))
    a, b, c, d = TOKENIZER.convert_tokens_to_ids(list("abcd"))

    def allowed(*tokens: int) -> list[int]:
        scores = processor(torch.tensor([[5, *tokens]]), torch.zeros(1, models.VOCAB_SIZE))
        return scores[0].isfinite().nonzero().flatten().tolist()

    assert allowed() == [a]
    assert allowed(a, b) == [c]
    assert allowed(a) == [b]
    assert allowed(a, d) == allowed(a, d, EOS) == [EOS]
    assert allowed(a, b, c) == [EOS]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"min_new_tokens": 8}),
        ("llama", {"min_new_tokens": 8, "do_sample": True, "num_return_sequences": 2}),
        ("llama", {"forced_eos_token_id": EOS, "max_new_tokens": 2}),
        ("bart", {"forced_bos_token_id": PAD}),
    ],
    ids=["minimum", "samples", "forced_eos", "forced_bos"],
)
def test_an_option_that_forbids_what_the_constraint_allows_ends_the_request(
    name: str, options: dict[str, Any]
) -> None:
    with engine_of(name, TOKENIZER) as engine:
        (result,) = engine.generate(["x"], {**GREEDY, **options}, regex="yes|no")
        assert isinstance(result.error, NoTokenError)
        assert "another option, such as `min_new_tokens`" in str(result.error)
        (other,) = engine.generate(["x"], GREEDY, regex="yes|no")
        assert other.text in ("yes", "no") and other.finish_reason == "eos"
        engine.check_integrity()


def test_a_beam_that_no_token_continues_ends_alone(engine: hf_paged.PagedEngine) -> None:
    """The vocabulary lacks a character of one of two texts."""
    options = {**GREEDY, "num_beams": 4}
    for regex in ("(ab|c\u00e9)", "(a|cd\u00e9)"):
        (result,) = engine.generate(["x"], options, regex=regex)
        assert result.error is None and result.text == regex[1:].partition("|")[0]
    (result,) = engine.generate(["x"], options, regex="a\u00e9")
    assert "no beam could end" in str(result.error)
    (result,) = engine.generate(["x"], options, regex="\u00e9")
    assert isinstance(result.error, NoTokenError)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"schema": {"type": "nonsense"}}, "`schema` cannot be compiled"),
        ({"schema": "{"}, "`schema` cannot be compiled"),
        ({"schema": 7}, "`schema` cannot be compiled"),
        ({"regex": "(a"}, "`regex` cannot be compiled"),
        ({"regex": b"a"}, "`regex` is b'a': it must be text"),
        ({"grammar": "root ::= missing"}, "`grammar` cannot be compiled"),
        ({"grammar": "a", "regex": "a"}, "exclude one another"),
    ],
    ids=str,
)
def test_what_is_refused(asked: dict[str, Any], message: str, engine: hf_paged.PagedEngine) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add_request([5, 6], GREEDY, **asked)
    assert not engine.has_unfinished and engine.memory.stats().held_bytes == 0


def test_a_constraint_needs_an_eos_and_a_tokenizer(engine: hf_paged.PagedEngine) -> None:
    for none in ({}, {"eos_token_id": None}, {"eos_token_id": -1}, {"eos_token_id": [-1]}):
        with pytest.raises(ValueError, match="set `eos_token_id`"):
            engine.add_request([5, 6], {"max_new_tokens": 4, **none}, regex="a")
    engine.tokenizer = None
    with pytest.raises(ValueError, match="`tokenizer=`"):
        engine.add_request([5, 6], GREEDY, regex="a")


@pytest.mark.slow
def test_example() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "examples/structured_output.py", "--quick"]
    run = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8", timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    form = r"form that was asked for: \{'schema': \d, 'regex': \d, 'grammar': \d\}\n"
    assert re.search(form, run.stdout)
