"""The pictures of the README: the contents of the blocks, and the timeline of the batch.

    python examples/pictures.py [--out FOLDER] [--quick]

A small Llama, trained on the CPU, serves beams, samples, prompts with a common prefix and prompts
without. Its blocks are drawn half-way. Then two engines with too few blocks for all of them serve
the same requests: one recomputes preempted requests, the other swaps their blocks to host memory
and back.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import tiny_model  # before transformers: it sets the environment
from matplotlib.figure import Figure

import hf_paged

OUT = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH, DPI = 8, 100  # inches; 800 pixels
NUM_BLOCKS = {"memory": 160, "timeline": 60}
PREEMPTION = ("recompute", "swap")


def make_requests(tokenizer: Any, new_tokens: int) -> list[tuple[str, list[int], dict[str, Any]]]:
    """Names, prompts and options: beams, samples, prompts with a common prefix, unrelated
    prompts."""

    def ids(topic: str, length: int) -> list[int]:
        return tokenizer(tiny_model.MANUAL[topic])["input_ids"][:length]

    document = ids("objects", 130)
    endings = [
        " What is the identity of an object?",
        " When is an object collected?",
        " What does a container hold?",
    ]
    requests = [
        ("8 beams", ids("exceptions", 150), {"num_beams": 8, "do_sample": False}),
        (
            "5 samples",
            ids("class", 150),
            {"num_return_sequences": 5, "do_sample": True, "top_k": 50},
        ),
    ]
    for number, ending in enumerate(endings, start=1):
        requests.append(
            (f"question {number}", document + tokenizer(ending)["input_ids"], {"do_sample": False})
        )
    for topic in ("assert", "import", "lambda", "while"):
        requests.append((topic, ids(topic, 60), {"do_sample": False}))
    limits = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    return [(name, prompt, options | limits) for name, prompt, options in requests]


def draw_memory(model: Any, tokenizer: Any) -> Figure:
    """Draws the blocks in the middle of a run, with those that an earlier request left in the
    prefix cache."""
    with hf_paged.PagedEngine(model, {"num_blocks": NUM_BLOCKS["memory"]}) as engine:
        document = tokenizer(tiny_model.MANUAL["objects"])["input_ids"][:400]
        engine.generate([document], {"max_new_tokens": 4, "do_sample": False})
        for seed, (name, prompt, options) in enumerate(make_requests(tokenizer, 40)):
            engine.add_request(prompt, options, request_id=name, seed=seed)
        for _ in range(20):
            engine.step()
        return engine.plot_memory()


def draw_timeline(model: Any, tokenizer: Any) -> Figure:
    """Draws the timeline of the same requests with each preemption method."""
    figure = Figure(figsize=(WIDTH, 6.4), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(PREEMPTION), sharex=True)
    for preemption, ax in zip(PREEMPTION, panels):
        config = hf_paged.PagedConfig(
            num_blocks=NUM_BLOCKS["timeline"],
            max_num_batched_tokens=96,
            preemption=preemption,
            prefix_caching=False,
        )
        with hf_paged.PagedEngine(model, config) as engine:
            serve(engine, make_requests(tokenizer, 60))
            engine.plot_timeline(ax=ax)
        ax.set_title(f'preemption="{preemption}"', loc="left", fontsize=10, pad=24)
    panels[0].set_xlabel("")
    return figure


def serve(
    engine: hf_paged.PagedEngine, requests: list[tuple[str, list[int], dict[str, Any]]]
) -> None:
    """Adds a request every fifth step, the small ones first, and steps until all have ended."""
    for step in range(10_000):
        if step % 5 == 0 and requests:
            name, prompt, options = requests.pop()
            engine.add_request(prompt, options, request_id=name, seed=len(requests))
        engine.step()
        if not requests and not engine.has_unfinished:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the pictures of the README.")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"where they go (default {OUT.name}, a temporary folder if --quick)",
    )
    tiny_model.add_arguments(parser, seconds=15)
    arguments = parser.parse_args()
    model, tokenizer = tiny_model.from_arguments(arguments)
    out = arguments.out or (Path(tempfile.mkdtemp()) if arguments.quick else OUT)
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("memory", draw_memory), ("timeline", draw_timeline)):
        path = out / f"{name}.png"
        draw(model, tokenizer).savefig(path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
