"""Generate for many prompts in several processes, one engine each, and compare with a single
process.

accelerate starts the processes, splits the prompts among them and gathers the results in prompt
order. Each process uses its own GPU; without GPUs, all run on the CPU (accelerate's `--cpu` would
start a single process, or require MPI). The script exits with status 1 if a token differs from a
single engine's for all prompts, or from plain `generate`'s for a sample of them.

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_batch.py
        [--prompts 64] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import tiny_model  # before transformers: it sets the environment
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from batch_generation import make_prompts, num_equal
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_paged

SAMPLE_SIZE = 8  # results compared with plain `generate`


def generate(
    state: PartialState, folder: str, prompts: list[list[int]], config: GenerationConfig
) -> list[Any]:
    """Results of all prompts in prompt order, in every process."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(state.device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with (
        state.split_between_processes(prompts) as mine,  # contiguous parts, in process order
        hf_paged.PagedEngine(model, tokenizer=tokenizer) as engine,
    ):
        results = engine.generate(mine, config)
        stats = engine.stats()
    print(
        f"process {state.process_index}: {len(mine)} prompts, {stats.num_generated_tokens} tokens",
        flush=True,
    )
    return gather_object(results)


def check(
    folder: str, prompts: list[list[int]], config: GenerationConfig, results: list[Any]
) -> int:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with hf_paged.PagedEngine(model) as engine:
        alone = engine.generate(prompts, config)
    same = sum(one.token_ids == many.token_ids for one, many in zip(alone, results, strict=True))
    print(f"{same} of {len(prompts)} results equal those of one process")
    every = max(1, len(prompts) // SAMPLE_SIZE)
    sample = results[::every]
    equal = num_equal(model, sample, [config] * len(sample))
    print(f"{equal} of {len(sample)} results equal plain `generate` on the prompt alone")
    return 0 if same == len(prompts) and equal == len(sample) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompts", type=int, default=64, help="how many (default 64; 13 with --quick)"
    )
    tiny_model.add_arguments(parser, seconds=15)
    arguments = parser.parse_args()
    state = PartialState(cpu=not torch.accelerator.is_available())
    with tempfile.TemporaryDirectory() as own:
        [folder] = broadcast_object_list([own])
        if state.is_main_process:  # the other processes load the saved checkpoint
            for each in tiny_model.from_arguments(arguments):
                each.save_pretrained(folder)
        state.wait_for_everyone()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = make_prompts(tokenizer, 13 if arguments.quick else arguments.prompts)
        config = GenerationConfig(
            max_new_tokens=12 if arguments.quick else 64,
            **tiny_model.GREEDY,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        results = generate(state, folder, prompts, config)
        status = check(folder, prompts, config, results) if state.is_main_process else 0
        state.wait_for_everyone()  # the process that made the folder deletes it
    state.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
