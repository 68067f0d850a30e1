"""Workloads that are interrupted or fail at any point, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import functools
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models
from tests.support.checks import assert_pool_empty
from tests.support.engine_helpers import lone_run, prompts, results_of, told_by
from tests.support.models import Options, Rows

GREEDY: Options = {"do_sample": False, "max_new_tokens": 6}
MODES: dict[str, Options] = {
    "greedy": GREEDY,
    "sampled": {"do_sample": True, "temperature": 1.0, "max_new_tokens": 6},
    "beams": {"num_beams": 3, **GREEDY},
}


class Requeued(Exception):
    """Of a handler of SIGUSR1, as Slurm sends it before a job's limit."""


RAISED: dict[int, type[BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: SystemExit,
    signal.SIGUSR1: Requeued,
}
"""Errors by the signals whose handlers raise them."""


class Case:
    """A workload to interrupt repeatedly. `run` is interrupted; `check` raises what is wrong
    afterwards."""

    model: PreTrainedModel
    # errors that a request of the interrupted run may end with
    injected: tuple[type[BaseException], ...] = (Requeued,)

    def run(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError


class Calls(Case):
    """Calls whose `tokens` are the same every time."""

    expected: Any
    paged: Options = models.PAGED

    def tokens(self, **paged: Any) -> Any:
        raise NotImplementedError

    def run(self) -> None:
        self.tokens(**self.paged)

    def check(self) -> None:
        assert_pool_empty(self.model, "a call that is gone")
        self.check_next()

    def check_next(self) -> None:
        tokens = self.tokens(**self.paged)
        assert tokens == self.expected, "the next call gives other tokens"
        assert_pool_empty(self.model, "the next call")


class Generate(Calls):
    """`generate` with rows of different lengths, or with other inputs; `more` options for long or
    assisted calls."""

    def __init__(self, model: PreTrainedModel, mode: str, inputs: Any = None, **more: Any) -> None:
        self.model, self.options = model, MODES[mode] | more
        name = "t5" if model.config.is_encoder_decoder else "llama"
        self.inputs = inputs or models.padded_prompt(name, (11, 4, 9))
        self.expected = self.tokens()

    def tokens(self, **paged: Any) -> Rows:
        torch.manual_seed(3)
        return self.model.generate(**self.inputs, **self.options, **paged).tolist()


class NativeManager(Calls):
    """transformers' continuous batching, which our thread serves."""

    def __init__(self) -> None:
        self.model = models.build("llama")
        self.prompts = prompts(9, 14, 5)
        self.expected = [lone_run(self.model, prompt, GREEDY)[0] for prompt in self.prompts]
        hf_paged.install(continuous_batching=True)

    def answers(self) -> list[Any]:
        options = GenerationConfig(**GREEDY, eos_token_id=-1)
        answers = self.model.generate_batch(
            self.prompts, generation_config=options, progress_bar=False
        )
        return list(answers.values())

    def tokens(self, **paged: Any) -> Rows:
        answers = self.answers()
        if errors := [answer.error for answer in answers if answer.error is not None]:
            raise RuntimeError(errors[0])
        return [answer.generated_tokens for answer in answers]

    def run(self) -> None:
        # ends the thread that serves, so that the next one is traced from its beginning
        hf_paged.free(self.model)
        self.answers()

    def check(self) -> None:  # the blocks of a session that is gone are freed by the next one
        self.check_next()


class Engine(Case):
    """An engine whose requests run by `generate`, `stream`, or steps that continue after the
    interrupt."""

    adapters: tuple[str | None, ...] = (None,) * 4  # of its requests

    def __init__(self, model: PreTrainedModel, how: str, **config: Any) -> None:
        self.model, self.how = model, how
        self.engine = PagedEngine(model, PagedConfig(block_size=8, **config))
        # of these, blocks of int8 give the tokens of a lone run, too
        self.prompts = [models.token_ids(1, n, seed=n)[0].tolist() for n in (9, 14, 5, 20)]
        self.options = [GREEDY, {**GREEDY, "num_beams": 2}, MODES["sampled"], GREEDY]
        self.expected = [*map(self.lone, self.prompts, self.options, self.adapters)]
        self.outputs: list[Any] = []

    def lone(self, prompt: list[int], options: Options, adapter: Any) -> list[int]:
        return lone_run(self.model, prompt, options, seed=7)[0]

    def add(self) -> None:
        for number, (prompt, *given) in enumerate(zip(self.prompts, self.options, self.adapters)):
            options, adapter = given
            named = {"request_id": str(number), "adapter": adapter}
            self.engine.add_request(prompt, options, seed=7, **named)

    def run(self) -> None:
        engine = self.engine
        if self.how == "generate":
            self.generate()
        elif self.how == "stream":
            stream = engine.stream(self.prompts, self.options, seed=[7] * len(self.prompts))
            with contextlib.closing(stream):
                for _ in stream:
                    pass
        else:
            self.add()
            while engine.has_unfinished:
                self.outputs += engine.step()

    def generate(self) -> list[Any]:
        return self.engine.generate(self.prompts, self.options, seed=[7] * len(self.prompts))

    def drain(self) -> None:
        """Runs the requests that are left, and checks the results of all. Those that an interrupt
        kept from being added are the last ones; one whose token was being chosen may have ended
        with an error."""
        while self.engine.has_unfinished:
            self.outputs += self.engine.step()
            self.engine.check_integrity()
        results, told = results_of(self.outputs), told_by(self.outputs)
        num_ended = sum(output.result is not None for output in self.outputs)
        assert num_ended == len(results), "a result was told twice"
        assert told.keys() <= results.keys(), "a result was not told"
        self.outputs.clear()
        for number in range(len(results)):
            result, tokens = results[str(number)], told[str(number)].get(0, [])
            # none of beams, whose tokens are final only at the end
            assert tokens == result.token_ids[: len(tokens)], "a token was told twice"
            is_interrupted = str(result.error).startswith("interrupted by")
            if not isinstance(result.error, self.injected) and not is_interrupted:
                assert tokens in ([], result.token_ids), "a token was not told"
                self.compare(number, result)

    def check(self) -> None:
        engine = self.engine
        engine.check_integrity()
        if self.how == "steps":
            self.drain()
        assert not engine.has_unfinished, "requests are left of a caller that is gone"
        assert engine.stats().used_blocks == 0, "blocks are held without a use"
        self.run_again()
        engine.check_integrity()
        assert not engine.has_unfinished and engine.stats().used_blocks == 0

    def run_again(self) -> None:
        for number, result in enumerate(self.generate()):
            self.compare(number, result)

    def compare(self, number: int, result: Any) -> None:
        if result.error is not None:
            raise result.error
        found = result.prompt_ids, result.token_ids
        expected = self.prompts[number], self.expected[number]
        assert found == expected, f"request {number} has other tokens"


class Adapters(Engine):
    """Each request runs with an adapter of its own, or none."""

    def __init__(self) -> None:
        from tests.support.peft_models import ADAPTERS, lora_model

        self.adapters = (*ADAPTERS, ADAPTERS[0])
        super().__init__(lora_model(), "steps")

    def lone(self, prompt: list[int], options: Options, adapter: Any) -> list[int]:
        from tests.support.peft_models import lone_with

        return lone_with(self.model, adapter, prompt, options, seed=7)[0]

    def run_again(self) -> None:
        self.add()
        self.drain()


class SavedPrefixes(Engine):
    """A prefix is written to a file and read by an engine whose cache is empty."""

    def __init__(self) -> None:
        self.file = Path(tempfile.mkdtemp()) / "prefix.safetensors"
        super().__init__(models.build("llama"), "generate")

    def run(self) -> None:
        self.engine.save_prefix(self.prompts[1], self.file)
        self.engine.reset_prefix_cache()
        self.engine.load_prefix(self.file)
        super().run()


def build_engine_in_a_tight_pool(preemption: str) -> Engine:
    # storage of pages has larger blocks, which preempt no request
    case = Engine(
        models.build("llama"), "steps", num_blocks=9, preemption=preemption, storage="blocks"
    )
    case.run()
    case.check()
    assert case.engine.stats().num_preemptions, "the pool is not small enough"
    return case


def _generate(name: str, mode: str = "greedy") -> Callable[[], Case]:
    return lambda: Generate(models.build(name), mode)


def _engine(name: str = "llama", how: str = "steps", **config: Any) -> Callable[[], Case]:
    return lambda: Engine(models.build(name), how, **config)


def _build_images() -> Case:
    from tests.support.architecture_configs import tiny_model
    from tests.support.architecture_media import media_inputs

    model = tiny_model(transformers.LlavaForConditionalGeneration)
    return Generate(model, "greedy", media_inputs(model)["image"])


def _build_assisted() -> Case:
    assistant = models.get_assistant("llama")
    inputs = models.padded_prompt("llama", (11,))
    return Generate(models.build("llama"), "greedy", inputs, assistant_model=assistant)


CASES: dict[str, Callable[[], Case]] = {
    **{f"generate, {mode}": _generate("llama", mode) for mode in MODES},
    "generate, encoder-decoder, greedy": _generate("t5"),
    "generate, encoder-decoder, beams": _generate("t5", "beams"),
    "generate, in transformers' loop": _generate("diff_llama"),
    "engine.generate": _engine(how="generate"),
    "engine.stream": _engine(how="stream"),
    "engine.step": _engine(),
    "engine.step, row by row": _engine("diff_llama"),
    "engine.step, recompute": functools.partial(build_engine_in_a_tight_pool, "recompute"),
    "engine.step, swap": functools.partial(build_engine_in_a_tight_pool, "swap"),
}
"""What `tests.support.interrupts` interrupts, by kind: what builds it, with its model."""

SCENARIOS: dict[str, Callable[[], Case]] = {
    **CASES,
    # long enough for its steps to be recorded
    "generate, recorded": lambda: Generate(
        models.build("llama"), "greedy", max_new_tokens=24, min_new_tokens=24
    ),
    "generate, assisted": _build_assisted,
    "generate, images": _build_images,
    "generate, hybrid": _generate("qwen3_next"),
    "engine.step, adapters": Adapters,
    "engine.step, hybrid": _engine("qwen3_next"),
    "engine.step, windows": _engine("gemma3", num_blocks=24),
    "engine.step, drafts": _engine(speculation="ngram"),
    "engine.step, int8": _engine(kv_dtype="int8"),
    "engine.step, virtual storage": _engine(storage="virtual"),
    "engine.step, tiers": lambda: _engine(num_blocks=9, prefix_tiers=tempfile.mkdtemp())(),
    "saved prefixes": SavedPrefixes,
    "native manager": NativeManager,
}
"""What `tests.support.line_faults` lets fail at every line."""
