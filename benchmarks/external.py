"""Engines apart from transformers as systems of `benchmarks.generate`: they load the model from files."""

from __future__ import annotations

import importlib.util
import tempfile
from abc import abstractmethod
from typing import Any

from benchmarks.models import PAD, Shape
from benchmarks.systems import Answer, NotAvailable, System
from benchmarks.workloads import Batch, Workload


class External(System):
    """
    An engine that is loaded once, from a temporary directory.

    Args:
        modules (`tuple[str, ...]`): Must be installed.
    """

    modules: tuple[str, ...] = ()
    is_peer = True

    def __init__(self) -> None:
        self.loaded: Any = None

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        if any(importlib.util.find_spec(module) is None for module in self.modules):
            raise NotAvailable("not installed")
        if workload.options.get("num_beams", 1) > 1:
            raise NotAvailable("skipped: greedy and sampling only")
        if self.loaded is None:
            with tempfile.TemporaryDirectory() as directory:
                model.save_pretrained(directory)
                self.loaded = self.load(directory, model)
        return Answer(self.run(workload, batch), [])

    @abstractmethod
    def load(self, directory: str, model: Any) -> Any:
        """The engine, with the model of the directory."""

    @abstractmethod
    def run(self, workload: Workload, batch: Batch) -> list[list[int]]:
        """New tokens of every row."""

    def free(self) -> None:
        self.loaded = None


class VLLM(External):
    """vLLM's offline `LLM` without a tokenizer; it takes up to 40% of the device's memory."""

    modules = ("vllm",)

    def load(self, directory: str, model: Any) -> Any:
        from vllm import LLM

        return LLM(
            directory,
            skip_tokenizer_init=True,
            dtype=str(model.dtype)[6:],
            gpu_memory_utilization=0.4,
            max_model_len=8192,
            disable_log_stats=True,
        )

    def run(self, workload: Workload, batch: Batch) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                n=workload.rows_per_prompt,
                temperature=1.0 if workload.sampled else 0.0,
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for new_tokens in batch.new_tokens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in batch.prompts]
        answers = self.loaded.generate(prompts, params, use_tqdm=False)
        return [list(row.token_ids) for answer in answers for row in answer.outputs]


class OpenVINO(External):
    """OpenVINO GenAI's continuous batching on the CPU, with a model that optimum-intel converts."""

    modules = ("openvino_genai", "optimum")

    def load(self, directory: str, model: Any) -> Any:
        import openvino_genai
        from optimum.intel import OVModelForCausalLM

        if model.device.type != "cpu":
            raise NotAvailable("skipped: runs on the CPU")
        OVModelForCausalLM.from_pretrained(directory, export=True, load_in_8bit=False).save_pretrained(directory)
        return openvino_genai.ContinuousBatchingPipeline(directory, openvino_genai.SchedulerConfig(), "CPU")

    def run(self, workload: Workload, batch: Batch) -> list[list[int]]:
        import openvino
        import openvino_genai

        configs = [
            openvino_genai.GenerationConfig(
                max_new_tokens=new_tokens,
                ignore_eos=True,
                do_sample=workload.sampled,
                num_return_sequences=workload.rows_per_prompt,
                pad_token_id=PAD,
            )
            for new_tokens in batch.new_tokens
        ]
        prompts = [openvino.Tensor([prompt]) for prompt in batch.prompts]
        answers = self.loaded.generate(prompts, configs)
        return [list(row) for answer in answers for row in answer.m_generation_ids]
