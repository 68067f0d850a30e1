"""Streaming: several prompts on one engine, `async for`, a request cancelled half-way, a streamer
for each row.

The tables below have a column per request and are printed line by line as text arrives, which shows
that the engine serves the requests together. The script exits with status 1 if anything differs
from plain `generate`.

    python examples/streaming.py [--train-seconds 15] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import tiny_model  # before transformers: it sets the environment
from transformers import TextStreamer

import hf_paged

PROMPTS = [
    "The with statement",
    "An exception is raised at the point where the error is",
    "A class definition is an executable statement. The inheritance list usually gives",
    "When a name is used in a code block,",
]
WIDTH = 26  # characters per column


class Columns:
    """Prints pieces of text side by side, a column for each of `titles`, and keeps the text of each
    column."""

    def __init__(self, titles: list[str]) -> None:
        self.texts = ["" for _ in titles]
        self._line = ["" for _ in titles]
        self._print([tiny_model.shown(title, WIDTH - 2) for title in titles])
        self._print(["-" * (WIDTH - 2) for _ in titles])

    def add(self, column: int, text: str | None) -> None:
        """Adds `text` to `column`; prints the line first if a piece would exceed its column."""
        if not text:
            return
        self.texts[column] += text
        piece = text.replace("\n", " ")
        if len(self._line[column]) + len(piece) > WIDTH - 2:
            self.flush()
        self._line[column] += piece

    def note(self, column: int, text: str) -> None:
        """Prints a remark about `column` on a separate line."""
        self.flush()
        self._line[column] = text
        self.flush()

    def flush(self) -> None:
        """Prints the pending line."""
        if any(cell.strip() for cell in self._line):
            self._print(self._line)
        self._line = ["" for _ in self._line]

    def _print(self, cells: list[str]) -> None:
        print("".join(cell[: WIDTH - 2].ljust(WIDTH) for cell in cells).rstrip(), flush=True)


def stream(engine: hf_paged.PagedEngine, limits: list[int]) -> list[str]:
    """Streams four prompts with different limits: a short one does not wait for the others."""
    columns, places = Columns(PROMPTS), {}
    configs = [{"max_new_tokens": limit, **tiny_model.GREEDY} for limit in limits]
    for output in engine.stream(PROMPTS, configs):
        column = places.setdefault(output.request_id, len(places))  # in prompt order
        columns.add(column, output.text)
        if output.result is not None:
            columns.note(column, f"({output.result.finish_reason})")
    return columns.texts


async def stream_to_clients(engine: hf_paged.PagedEngine, limit: int) -> list[str]:
    """Runs a coroutine per prompt, as in a server: independent clients that share the engine's
    steps."""
    columns = Columns([f"client {column}" for column in range(len(PROMPTS))])

    async def serve(column: int, prompt: str) -> None:
        await asyncio.sleep(0.02 * column)  # not all arrive at once
        async for output in engine.astream(
            [prompt], {"max_new_tokens": limit, **tiny_model.GREEDY}
        ):
            columns.add(column, output.text)

    await asyncio.gather(*(serve(column, prompt) for column, prompt in enumerate(PROMPTS)))
    columns.flush()
    return columns.texts


def stream_and_cancel(engine: hf_paged.PagedEngine, limit: int) -> list[list[int]]:
    """Cancels the second request after a third of its tokens, and returns the tokens of both
    results."""
    columns, results = Columns(PROMPTS[:2]), {}
    options = {"max_new_tokens": limit, **tiny_model.GREEDY}
    first, second = (engine.add_request(prompt, options) for prompt in PROMPTS[:2])
    num_tokens = 0
    while engine.has_unfinished:
        for output in engine.step():
            column = int(output.request_id == second)
            columns.add(column, output.text)
            num_tokens += column
            if num_tokens == limit // 3 and column == 1 and not output.finished:
                before = engine.stats().used_blocks
                engine.cancel(second)
                columns.note(1, f"(blocks: {before}, now {engine.stats().used_blocks})")
            if output.result is not None:
                results[output.request_id] = output.result
                columns.note(column, f"({output.result.finish_reason})")
    return [results[first].token_ids, results[second].token_ids]


class ColumnStreamer(TextStreamer):
    """transformers' `TextStreamer`, which emits whole words, into a column instead of on stdout."""

    def __init__(self, tokenizer: Any, columns: Columns, column: int) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.columns, self.column = columns, column

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.columns.add(self.column, text)


def stream_generate(model: Any, tokenizer: Any, limit: int) -> list[str]:
    """Calls `generate` on a padded batch, with a streamer for each row."""
    columns = Columns([f"row {row}" for row in range(len(PROMPTS))])
    model.generate(
        **tokenizer(PROMPTS, return_tensors="pt", padding=True),
        cache_implementation="paged",
        streamer=[ColumnStreamer(tokenizer, columns, row) for row in range(len(PROMPTS))],
        max_new_tokens=limit,
        **tiny_model.GREEDY,
    )
    columns.flush()
    return columns.texts


def plain_tokens(model: Any, tokenizer: Any, limit: int) -> list[list[int]]:
    """Tokens of plain `generate` for each prompt alone."""
    rows = []
    for prompt in PROMPTS:
        inputs = tokenizer([prompt], return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=limit, **tiny_model.GREEDY)
        rows.append(tokens[0, inputs["input_ids"].shape[1] :].tolist())
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tiny_model.add_arguments(parser, seconds=15)
    arguments = parser.parse_args()
    model, tokenizer = tiny_model.from_arguments(arguments)
    limit = 12 if arguments.quick else 48
    plain = plain_tokens(model, tokenizer, limit)
    plain_texts = tokenizer.batch_decode(plain, skip_special_tokens=True)
    equal = []

    with hf_paged.PagedEngine(model, tokenizer=tokenizer) as engine:
        print("engine.stream(prompts)\n")
        limits = [limit // 3, limit, limit // 2, limit]
        expected = [
            tokenizer.decode(row[:end], skip_special_tokens=True) for row, end in zip(plain, limits)
        ]
        equal.append(stream(engine, limits) == expected)

        print("\nengine.astream([prompt]), a coroutine for each prompt\n")
        before = engine.stats()
        equal.append(asyncio.run(stream_to_clients(engine, limit)) == plain_texts)
        after = engine.stats()
        num_tokens = after.num_generated_tokens - before.num_generated_tokens
        print(f"\n{num_tokens} tokens in {after.num_steps - before.num_steps} steps")

        print("\nengine.cancel(request_id) after a third of the second request\n")
        whole, part = stream_and_cancel(engine, limit)
        equal.append(whole == plain[0] and 0 < len(part) < limit and part == plain[1][: len(part)])
        engine.check_integrity()

    print('\nmodel.generate(cache_implementation="paged", streamer=[one for each row])\n')
    equal.append(stream_generate(model, tokenizer, limit) == plain_texts)

    print(f"\nequal to plain generate: {', '.join('yes' if each else 'NO' for each in equal)}")
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
