"""Models that accelerate runs under bf16 autocast, and other precisions of float32.

bfloat16 keeps 8 bits, so a random model's best two tokens are often equal, and the order of a sum
decides. These models have memorized answers, each from its whole prompt, so no choice depends on
rounding.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel
from transformers.utils.import_utils import enable_tf32

import hf_paged
from hf_paged import PagedEngine, inspect
from tests.callers.test_callers import BEAMS, GREEDY, SAMPLES, assert_used_pool
from tests.support import models
from tests.support.checks import assert_same_tokens, generate_both
from tests.support.engine_helpers import assert_lone, engine_of, prompts, results_of
from tests.support.precision import BY_BACKEND, LEGACY, default_precision
from tests.support.rooms import records_on_cpu

NUM_PROMPTS, PROMPT_LENGTH, ANSWER_LENGTH = 8, 21, 10
PADDING = 6  # tokens


@pytest.fixture(autouse=True)
def no_accelerator_left() -> Iterator[None]:
    """accelerate keeps its mixed precision in globals, which would affect another test's
    Accelerator or Trainer."""
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:  # those of tests of other files
        state._reset_state()
    yield
    for state in states:
        state._reset_state()


class Answers(Dataset):
    """
    Prompts that differ in one token, every second left-padded, and an answer to each.

    Args:
        joined (`bool`): Answers follow the prompts, as in training of a decoder-only model, with
            the loss on the answer. Otherwise they are the labels: of an encoder-decoder model, with
            the same number of tokens, or, to evaluate a decoder-only model, of the prompt.
    """

    def __init__(self, is_encoder_decoder: bool, joined: bool) -> None:
        self.prompts = models.token_ids(1, PROMPT_LENGTH, seed=1).repeat(NUM_PROMPTS, 1)
        self.prompts[:, PROMPT_LENGTH // 2] = torch.arange(NUM_PROMPTS) + 40
        self.masks = torch.ones_like(self.prompts)
        self.masks[1::2, :PADDING] = 0
        self.prompts[1::2, :PADDING] = models.PAD
        self.answers = models.token_ids(NUM_PROMPTS, ANSWER_LENGTH, seed=2)
        self.labels = self.answers if is_encoder_decoder else self.prompts
        self.ids = self.prompts
        if joined and not is_encoder_decoder:
            self.ids = torch.cat([self.prompts, self.answers], 1)
            self.masks = torch.cat([self.masks, torch.ones_like(self.answers)], 1)
            self.labels = torch.cat([torch.full_like(self.prompts, -100), self.answers], 1)

    def __len__(self) -> int:
        return NUM_PROMPTS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.ids[index],
            "attention_mask": self.masks[index],
            "labels": self.labels[index],
        }


def assert_known(tokens: Tensor, answers: Tensor) -> None:
    assert_same_tokens(answers, tokens[:, -ANSWER_LENGTH:], "plain does not know them: void")


@functools.cache
def _knowing(name: str) -> PreTrainedModel:
    """A model that knows the answers, trained in float32."""
    model = models.build(name).train()
    data = Answers(model.config.is_encoder_decoder, joined=True)
    batch = {key: torch.stack([data[i][key] for i in range(len(data))]) for key in data[0]}
    positions = {}
    if not model.config.is_encoder_decoder:  # as `generate` counts
        positions["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(300):
        optimizer.zero_grad()
        loss = model(**batch, **positions).loss
        if loss < 0.01:
            break
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.slow_cases(but=["llama-*"])
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "t5"])
def test_accelerate_bf16(name: str, num_beams: int) -> None:
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(copy.deepcopy(_knowing(name)))
    data = Answers(model.config.is_encoder_decoder, joined=False)
    dtypes: set[torch.dtype] = set()
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    inputs = {"input_ids": data.prompts, "attention_mask": data.masks}
    options = {"max_new_tokens": ANSWER_LENGTH, "num_beams": num_beams, "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert dtypes == {torch.bfloat16}, "no autocast: the test is void"
    hook.remove()
    assert_known(expected, data.answers)
    assert_same_tokens(expected, model.generate(**inputs, **options, **models.PAGED))
    assert hf_paged.last_route(model).road == "engine"
    assert_used_pool(model)


# --------------------------------------------------------------------------- precision of float32

NEW = 20  # tokens: enough for recorded steps
SETTERS = {**BY_BACKEND, **LEGACY, "enable_tf32": lambda: enable_tf32(True)}


@pytest.mark.slow_cases(but=["enable_tf32"])
@pytest.mark.parametrize(
    "name",
    [
        *("enable_tf32", "cuda.matmul", "cudnn", "mkldnn.matmul"),
        *("medium, then all", "all, then medium"),
    ],
)
def test_precision_of_float32(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`TrainingArguments(tf32=True)`, which wants an Ampere GPU, calls `enable_tf32`."""
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    model.config.save_pretrained(tmp_path)
    with default_precision():
        for part in name.split(", then "):
            SETTERS[part]()
        for mode in (GREEDY, BEAMS, SAMPLES):
            options = {**mode, "max_new_tokens": NEW}
            assert_same_tokens(*generate_both(model, inputs, options), name)
            route = hf_paged.last_route(model)
            assert route is not None and route.road == "engine"
            assert route.reason.startswith("packed")
            assert not records_on_cpu() or route.num_captured_steps > 0
        with PagedEngine(model, {"block_size": models.BLOCK_SIZE}) as engine:
            assert_lone(engine, prompts(9), engine.generate(prompts(9), GREEDY), GREEDY)
        assert inspect.main([str(tmp_path)]) == 0
    assert "packed" in capsys.readouterr().out
    assert_used_pool(model)


@pytest.mark.slow
def test_an_engine_between_whose_steps_the_precision_changes() -> None:
    options = {**GREEDY, "max_new_tokens": 2 * NEW}
    with default_precision(), engine_of() as engine:
        for setter in [lambda: None, *BY_BACKEND.values()]:
            name = engine.add_request(prompts(9)[0], options)
            for _ in range(NEW):
                engine.step()
            setter()
            outputs = []
            while engine.has_unfinished:
                outputs += engine.step()
            assert_lone(engine, prompts(9), [results_of(outputs)[name]], options)
