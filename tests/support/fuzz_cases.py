"""Random `generate` calls as plain data: how `tests.support.fuzz` draws a call and turns it into
arguments.

A case depends only on its number. Parts that depend on text (end tokens, stop strings) are drawn as
steps of the plain greedy text and looked up when the case is played, so that rows really end, and
at different steps.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from tests.support import models
from tests.support.models import Options, Rows
from tests.support.user_code import Criterion, Processor
from tests.test_parity_matrix import (
    FREQUENT_ENDS,
    WATCHERS,
    Allowed,
    Recorder,
    RowBias,
    RowBudgets,
)

GREEDY_STEPS = 12  # length of the plain text that end tokens and stop strings come from
# tokens: around block edges and beyond the window of 8
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 33, 40)


@dataclasses.dataclass(frozen=True)
class Case:
    """One or more calls of one model with one set of options."""

    seed: int  # determines the case, with the number
    number: int
    model: str
    mode: str  # "greedy", "sample", "beams" or "beam_sample"
    lengths: tuple[int, ...]  # tokens of each prompt; shorter ones are left-padded
    # "words", "few_words" (n-grams repeat), "shared" (a common prefix) or "equal"
    prompts: str
    # "given", "absent", "hole" (zero inside a prompt) or "embeds" (`inputs_embeds` for the ids)
    mask: str
    # "first", then "same" (again) or "turn" (the answer so far plus new words)
    calls: tuple[str, ...]
    options: Options  # arguments of `generate`, passed as they are
    # arguments built for each call: names of extras, steps of the greedy text, a limit in tokens
    late: Options
    cache_config: Options  # of the paged side
    # `num_blocks` as a share of the blocks that all rows need at their longest
    budget: float | None
    by_config: bool  # `options` travel in a `GenerationConfig`
    train: bool  # the model is in train mode

    def __str__(self) -> str:
        fields = vars(self).items()
        return ", ".join(f"{name}={x!r}" for name, x in fields if name not in ("seed", "number"))


PROCESSORS: dict[str, Callable[[], Any]] = {
    "bias": RowBias,
    "banned": lambda: Processor("banned"),
    "odd": lambda: Processor("odd"),
    "breaks": lambda: Processor("raises", 2),
}
CRITERIA: dict[str, Callable[[], Any]] = {
    "budgets": RowBudgets,
    "eleventh": lambda: Criterion("eleventh"),
    "all": lambda: Criterion("all", 6),
}
OBJECTS = {  # argument, kinds and how often, class of the list
    "processors": ("logits_processor", PROCESSORS, (5, 4, 4, 1), LogitsProcessorList),
    "criteria": ("stopping_criteria", CRITERIA, (5, 3, 1), StoppingCriteriaList),
}

# ---------------------------------------------------------------------------------------- the draw

# without `do_sample` transformers ignores them with a warning
SHARPENERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.4, 0.8, 1.7),
    "top_k": (1, 5, 30, 0),
    "top_p": (0.5, 0.9),
    "min_p": (0.02, 0.2),
    "typical_p": (0.4, 0.9),
    "top_h": (0.5,),
    "epsilon_cutoff": (0.02,),
    "eta_cutoff": (0.02,),
}
SHAPERS: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (0.8, 1.2, 1.8),
    "no_repeat_ngram_size": (1, 2, 3),
    "encoder_repetition_penalty": (1.5,),
    "encoder_no_repeat_ngram_size": (2, 3),
    "bad_words_ids": ([[10], [42], [18, 42], [99], [83]],),
    "suppress_tokens": (list(range(60, 110)),),
    "begin_suppress_tokens": (list(range(3, 90)),),
    "forced_bos_token_id": (33,),
    "forced_eos_token_id": (50, [50, 51]),
    "sequence_bias": ([[[17], -4.0], [[40, 41], 5.0], [[8], 3.0]],),
    "exponential_decay_length_penalty": ((3, 1.6),),
    "renormalize_logits": (True,),
    "remove_invalid_values": (True,),
    "guidance_scale": (1.5,),
    "min_new_tokens": (1, 4, 8),
    "min_length": (5, 12, 30),
    "watermarking_config": (
        WatermarkingConfig(bias=2.0, seeding_scheme="lefthash"),
        WatermarkingConfig(bias=2.0, seeding_scheme="selfhash", context_width=2),
        SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836], context_history_size=32),
    ),
}
# Calls that plain refuses, whatever the other options.
INVALID: tuple[Options, ...] = (
    {"num_beams": 2, "num_return_sequences": 3},
    {"do_sample": False, "num_beams": 1, "num_return_sequences": 2},
    {"do_sample": True, "temperature": -1.0},
    {"do_sample": True, "top_p": 1.5},
    {"do_sample": True, "top_k": -3},
    {"max_new_tokens": 0},
    {"no_such_option": 1},
    {"stop_strings": ["x"]},  # without a tokenizer
    {"repetition_penalty": -1.0},
    {"min_new_tokens": -1},
    {"bad_words_ids": []},
    {"cache_implementation": "nonsense"},
    {"num_beams": 0},
)


def draw(seed: int, number: int, model: str | None = None) -> Case:
    """Draws case `number` of `seed`, the same on every machine. `model` overrides the drawn
    model."""
    rng = random.Random(seed * 1_000_003 + number)
    name = rng.choice(models.DECODER_ONLY)
    name = model or name
    mode = rng.choices(("greedy", "sample", "beams", "beam_sample"), (40, 30, 18, 12))[0]
    options: Options = {"do_sample": "sample" in mode}
    if "beam" in mode:
        options["num_beams"] = rng.randint(2, 4)
        ends = dict(early_stopping=(True, False, "never"), length_penalty=(0.0, 0.5, 2.0))
        options |= _some(rng, 0.5, **ends)
        options |= _some(rng, 0.4, num_return_sequences=(2, options["num_beams"]))
    elif mode == "sample":
        options |= _some(rng, 0.4, num_return_sequences=(2, 3, 4))
    pool = SHAPERS | (SHARPENERS if mode in ("sample", "beam_sample") or rng.random() < 0.1 else {})
    for option in rng.sample(list(pool), rng.choice((0, 0, 1, 1, 2, 3, 4))):
        options[option] = rng.choice(pool[option])
    options |= _returned(rng)
    options |= _some(rng, 0.04, use_cache=(False,))
    options |= _some(rng, 0.08, prefill_chunk_size=(1, 4, 5, 16))
    rows = rng.choice((1, 1, 2, 3, 3, 4, 5))
    lengths = [rng.choice(LENGTHS) for _ in range(rows)]
    late = _late(rng, mode, rows)
    by_config = rng.random() < 0.2
    if rng.random() < 0.05:
        options |= rng.choice(INVALID)
        by_config = False  # a config refuses some of these values itself
    return Case(
        seed=seed,
        number=number,
        model=name,
        mode=mode,
        lengths=tuple(lengths if rng.random() < 0.7 else lengths[:1] * rows),
        prompts=rng.choice(("words", "words", "few_words", "shared", "shared", "equal")),
        mask=rng.choices(("given", "absent", "hole", "embeds"), (86, 8, 3, 3))[0],
        calls=("first", *rng.choices(("same", "turn"), k=rng.choice((0, 0, 1, 2)))),
        options=options,
        late=late,
        cache_config={"block_size": rng.choice((8, 16, 32))},
        budget=rng.choice((0.3, 0.6, 1.0, 1.5)) if rng.random() < 0.2 else None,
        by_config=by_config,
        # dropout consumes the random state in another order
        train=rng.random() < 0.05 and name != "gpt2",
    )


def _some(rng: random.Random, share: float, **choices: tuple[Any, ...]) -> Options:
    """Picks each option with probability `share`, with one of its values."""
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < share}


def _returned(rng: random.Random) -> Options:
    """Options that return more than tokens, in about every third case."""
    if rng.random() > 0.35:
        return {}
    flags = {"output_scores": 0.7, "output_logits": 0.5, "output_hidden_states": 0.25}
    given = [flag for flag, share in flags.items() if rng.random() < share]
    return dict.fromkeys(["return_dict_in_generate", *given], True)


def _late(rng: random.Random, mode: str, rows: int) -> Options:
    limit = rng.choice(("max_new_tokens", "max_new_tokens", "max_length"))
    late: Options = {limit: rng.randint(1, 24)}
    kind = rng.choice(("none", "one", "some", "some", "frequent", "frequent"))
    if kind == "frequent":
        late["ends"] = "frequent"
    elif kind != "none":
        steps = 1 if kind == "one" else 3
        late["ends"] = [(rng.randrange(rows), rng.randrange(1, GREEDY_STEPS)) for _ in range(steps)]
    for name, (_, classes, weights, _) in OBJECTS.items():
        if rng.random() < 0.2:
            late[name] = rng.choices(list(classes), weights, k=rng.choice((1, 1, 2)))
    if rng.random() < 0.08:
        step = rng.randrange(rows), rng.randrange(2, GREEDY_STEPS - 2)
        late["stop_strings"] = *step, rng.random() < 0.5
    if rng.random() < 0.07:
        late["prefix_allowed"] = True
    if rng.random() < (0.25 if rows == 1 else 0.04) and ("beam" not in mode or rng.random() < 0.1):
        late["streamer"] = True
    if rows == 1 and mode in ("greedy", "sample") and rng.random() < 0.1:
        late["prompt_lookup"] = 3
    return late


# -------------------------------------------------------------------------------------- arguments


def prompts(case: Case) -> Rows:
    """Prompts of the first call, words only."""
    longest = max(case.lengths)
    text = models.token_ids(len(case.lengths), longest, seed=1000 * case.seed + case.number)
    if case.prompts == "few_words":
        text = models.FIRST_WORD + text % 4
    elif case.prompts == "equal":
        text = text[:1].repeat(len(text), 1)
    elif case.prompts == "shared":
        text[:, : longest * 3 // 4] = text[0, : longest * 3 // 4].clone()
    return [row[:length] for row, length in zip(text.tolist(), case.lengths)]


def inputs(case: Case, rows: Rows, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """`rows` left-padded, as keyword arguments of `generate`."""
    inputs = models.left_padded(rows)
    if case.mask == "absent":
        del inputs["attention_mask"]
    elif case.mask == "hole" and len(rows[0]) > 2:
        inputs["attention_mask"][0, -2] = 0
    elif case.mask == "embeds":
        embeddings = model.get_input_embeddings()
        inputs["inputs_embeds"] = embeddings(inputs.pop("input_ids")).detach()
    return inputs


def turn(rows: Rows, sequences: torch.Tensor, seed: int) -> Rows:
    """Prompts of the next turn: the prompt, the end of its first answer, and five new words."""
    answers = sequences[:: len(sequences) // len(rows), -GREEDY_STEPS:].tolist()
    words = models.token_ids(len(rows), 5, seed=seed).tolist()
    return [
        row + [t for t in said if t != models.PAD] + new
        for row, said, new in zip(rows, answers, words)
    ]


@dataclasses.dataclass
class Extras:
    """User objects of one call; `seen` holds the values passed to them, for comparison."""

    arguments: Options

    def seen(self) -> list[Any]:
        given = self.arguments
        objects = [*given.get("logits_processor", ()), *given.get("stopping_criteria", ())]
        objects += [given.get("streamer"), given.get("prefix_allowed_tokens_fn")]
        return [thing.seen for thing in objects if type(thing) in WATCHERS.values()]


def arguments(case: Case, width: int, greedy: Rows) -> Extras:
    """Keyword arguments of one call, with new user objects, for prompts padded to `width` tokens;
    `greedy`: plain greedy text of each row, `GREEDY_STEPS` tokens."""
    late, given = case.late, copy.deepcopy(case.options)
    if "max_new_tokens" in late:
        given.setdefault("max_new_tokens", late["max_new_tokens"])
    elif "max_new_tokens" not in given:
        given["max_length"] = late["max_length"] + (0 if case.mask == "embeds" else width)
    if late.get("ends") == "frequent":
        given["eos_token_id"] = FREQUENT_ENDS
    elif "ends" in late:
        ends = sorted({greedy[row][step] for row, step in late["ends"]})
        given["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if "prompt_lookup" in late:
        given["prompt_lookup_num_tokens"] = late["prompt_lookup"]
    if case.by_config:
        unknown = {name: given.pop(name) for name in ["no_such_option"] if name in given}
        given = {"generation_config": GenerationConfig(pad_token_id=models.PAD, **given), **unknown}
    for name, (argument, makers, _, many) in OBJECTS.items():
        if name in late:
            given[argument] = many(makers[kind]() for kind in late[name])
    if "stop_strings" in late:
        row, step, inside = late["stop_strings"]
        text = models.tokenizer().decode(greedy[row][step : step + 2])
        text = text[1:] if inside and len(text) > 1 else text or "x"
        given |= {"stop_strings": [text], "tokenizer": models.tokenizer()}
    if "prefix_allowed" in late:
        given["prefix_allowed_tokens_fn"] = Allowed()
    if "streamer" in late:
        given["streamer"] = Recorder()
    return Extras(given)
