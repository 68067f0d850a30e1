"""
Many machines by way of Ray, one `PagedEngine` in each of its workers. Needs the extra `ray`.

    ds = ds.map_batches(hf_paged.ray.LLMPredictor, fn_constructor_args=(name, {"max_new_tokens": 64}),
                        concurrency=2, num_gpus=1, batch_size=256)                              # Ray Data
    app = serve.deployment(hf_paged.ray.LLMServer).bind(name, {"max_new_tokens": 64})           # Ray Serve

Ray starts the workers, gives them their devices, restarts those that died and repeats what these had in hand.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig

from .batching.arguments import as_config
from .batching.engine import PagedEngine
from .batching.results import EngineStats, RequestOutput, RequestResult
from .cache.block_pool import OutOfBlocksError

try:
    import ray  # noqa: F401
except ImportError as error:
    raise ImportError('`hf_paged.ray` needs Ray: pip install "hf_paged[ray]"') from error

ERROR = "__inference_error__"
"""The column of `ray.data.llm` that says why a row failed: empty for those that did not."""

_FIELDS = {"generation_config", "prompt", "seed"}  # of a body: what a client may choose


class _Worker:
    """An engine that its process made on its own, and the generation options of requests that have none."""

    def __init__(
        self,
        model_source: str | Callable[..., PagedEngine],
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        *,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        make = model_source if callable(model_source) else PagedEngine.from_pretrained
        args = () if callable(model_source) else (model_source,)
        self.engine = make(*args, **(engine_kwargs or {}))
        if not isinstance(self.engine, PagedEngine):
            raise TypeError(
                f"`model_source` made a {type(self.engine).__name__}: it must be the name or the folder of a model, or "
                "a function that returns a `PagedEngine`"
            )
        as_config(generation_config)  # else each request would be refused
        self._options = _options(generation_config)
        if isinstance(generation_config, Mapping):  # whose None is one, as in `PagedEngine.add_request`
            self._options = dict(generation_config)

    def _config(self, own: Any) -> Any:
        """The generation config of a request, whose own options come first. One that is none the engine refuses."""
        return {**self._options, **_options(own)} if isinstance(own, (GenerationConfig, Mapping, type(None))) else own


class LLMPredictor(_Worker):
    """
    A callable class for `ray.data.Dataset.map_batches`: prompts in, tokens out.

    Each worker makes an engine of its own and runs a batch through it, in the order of its rows. A row that cannot be
    served has its error in a column, and the others finish. A worker that dies is started again by Ray, which repeats
    the batches that it had in hand; they give the same rows.

    The prompts are a column of text, of token ids or of chat messages. Two more columns are read where a batch has
    them. `generation_config`: options of the row, over those of all; nulls, with which Arrow fills missing fields, set
    nothing. (Where rows set different options, pass `batch_format="pyarrow"`: NumPy and pandas have no missing whole
    numbers and make floats of all of them.) `seed`: draws of the row, as `PagedEngine.add_request` takes it. It belongs
    to the row, not to its place in a batch, so that samples are the same however rows are parted, ordered and repeated.
    Without one they depend on all of that.

    All columns are kept, and these are added, with the names of `ray.data.llm`: `generated_text` (of the first
    sequence), `generated_tokens` (`list[int64]`, of the same), `num_input_tokens`, `num_generated_tokens`,
    `finish_reason`, `sequences` (all of the row, as structs with the fields of [`SequenceResult`]), `prompt_logprobs`
    and `prompt_top_logprobs` (null unless `options` ask for them), and `__inference_error__` (`"ValueError: ..."`, or
    empty).

    Args:
        model_source (`str` or callable): A name or folder for `PagedEngine.from_pretrained`, or a function that returns
            a `PagedEngine`; it runs in the worker.
        generation_config ([`GenerationConfig`] or `dict`, *optional*): Over the model's own.
        engine_kwargs (`dict`, *optional*): Keywords of `from_pretrained`, or of the function: `config`, `tokenizer`,
            `dtype`, `device_map`, ...
        prompt_column (`str`): Where the prompts are.
        row_options (`tuple[str, ...]`): The columns that are options of a row: `generation_config`, and those of which
            `PagedEngine.generate` takes a list (`adapter`, `schema`, `seed`, ...).
        options: Those of `PagedEngine.generate` for all rows.

    Raises:
        ValueError: for a model that a `PagedEngine` refuses; in a call, for a batch without a column of prompts.
        torch.AcceleratorError: in a call, where the device is lost to the process.

    Example:

    ```python
    ds = ray.data.from_items([{"prompt": prompt, "seed": i} for i, prompt in enumerate(prompts)])
    ds = ds.map_batches(
        LLMPredictor, fn_constructor_args=("Qwen/Qwen3-8B", {"max_new_tokens": 64}), concurrency=2, num_gpus=1
    )
    ```
    """

    def __init__(
        self,
        model_source: str | Callable[..., PagedEngine],
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        *,
        engine_kwargs: Mapping[str, Any] | None = None,
        prompt_column: str = "prompt",
        row_options: tuple[str, ...] = ("generation_config", "seed"),
        **options: Any,
    ) -> None:
        super().__init__(model_source, generation_config, engine_kwargs=engine_kwargs)
        self.prompt_column, self.row_options, self.options = prompt_column, row_options, options
        self.engine.generate([], **options)  # refuses what it does not know

    def __call__(self, batch: Any) -> Any:
        """The rows of a batch with what was generated, a `pyarrow.Table`. The batch is a dict of arrays, a
        `pandas.DataFrame` or a `pyarrow.Table`."""
        from ray.data.block import BlockAccessor

        table = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
        names = table.column_names
        if self.prompt_column not in names:
            raise ValueError(f"the batch has the columns {names}, and no `{self.prompt_column}`: set `prompt_column`")
        read = [self.prompt_column, *(name for name in self.row_options if name in names)]
        rows = list(BlockAccessor.for_block(table.select(read)).iter_rows(public_row_format=True))
        each: dict[str, Any] = {name: [None if _is_missing(row[name]) else row[name] for row in rows] for name in read}
        prompts, configs = each.pop(self.prompt_column), each.pop("generation_config", [None] * len(rows))
        results = self.engine.generate(prompts, [*map(self._config, configs)], **{**self.options, **each})
        for result in results:
            if isinstance(result.error, torch.AcceleratorError):
                raise result.error  # no row's fault: the device is lost to this process, and all rows would fail
        added = _table(results)
        table = table.select([name for name in names if name not in added.column_names])
        for name in added.column_names:
            table = table.append_column(name, added[name])
        return table


class LLMServer(_Worker):
    """
    A deployment for Ray Serve, one engine a replica: `serve.deployment(LLMServer).bind(name)`.

    Through a handle, `handle.options(stream=True).generate.remote(prompt, generation_config)` gives the outputs as they
    come. Over HTTP, a POST of `{"prompt": ..., "generation_config": {...}, "seed": ..., "stream": true}` gives them as
    server-sent events, without `stream` the result alone, both as JSON with the fields of [`RequestOutput`] and
    [`RequestResult`]. A client that goes away, or a handle's response that is cancelled, ends its request, and its
    blocks go back. `max_ongoing_requests` of the deployment, 5 unless set, is how many requests Serve sends to a
    replica at a time: set it to what the engine is to batch.

    Args:
        model_source, generation_config, engine_kwargs: As those of [`LLMPredictor`].
    """

    _lost: Exception | None = None  # with what the device was lost to this process

    async def generate(
        self, prompt: Any, generation_config: Any = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one prompt, as `PagedEngine.astream` gives them, with its arguments."""
        outputs = self.engine.astream([prompt], [self._config(generation_config)], **options)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if output.result is not None and isinstance(output.result.error, torch.AcceleratorError):
                    self._lost = output.result.error
                yield output

    def check_health(self) -> None:
        """Raises the error with which a device was lost to this process: Serve then starts another replica."""
        if self._lost is not None:
            raise self._lost

    def stats(self) -> EngineStats:
        """What the engine of this replica holds and has done."""
        return self.engine.stats()

    async def __call__(self, request: Any) -> Any:
        """Answers a `starlette.requests.Request`; what is wrong with it has the status 400."""
        from starlette.responses import Response, StreamingResponse

        try:
            body = dict(await request.json())
            if not isinstance(is_stream := body.pop("stream", False), bool):
                raise ValueError(f"`stream` is {is_stream!r}: it must be true or false")
            if unknown := body.keys() - _FIELDS:
                raise ValueError(f"the body has the fields {sorted(unknown)}: there are {sorted(_FIELDS)} and stream")
            outputs = self.generate(body.pop("prompt"), **body)
            first = await anext(outputs)
        except (KeyError, TypeError, ValueError) as error:  # `JSONDecodeError` is one of these
            return Response(_json({"error": error}), 400, media_type="application/json")
        if is_stream and (first.result is None or first.result.error is None):
            return StreamingResponse(_events(first, outputs), media_type="text/event-stream")
        [result] = [each.result for each in [first, *[each async for each in outputs]] if each.result is not None]
        is_refused = isinstance(result.error, (OutOfBlocksError, TypeError, ValueError))
        status = 400 if is_refused else 500 if result.error is not None else 200
        return Response(_json(result), status, media_type="application/json")


async def _events(first: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncIterator[str]:
    async with contextlib.aclosing(outputs):
        yield f"data: {_json(first)}\n\n"
        async for output in outputs:
            yield f"data: {_json(output)}\n\n"


def _json(value: Any) -> str:
    return json.dumps(value, default=lambda each: _said(each) if isinstance(each, Exception) else vars(each))


def _said(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _options(config: GenerationConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """Those that a generation config sets."""
    options = config.to_dict() if isinstance(config, GenerationConfig) else config or {}
    return {name: value for name, value in options.items() if not _is_missing(value)}


def _is_missing(value: Any) -> bool:
    """Nulls, which NumPy and pandas have as NaN among numbers."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _table(results: list[RequestResult]) -> Any:
    """A `pyarrow.Table` of results, whose types do not depend on what is in them: batches are put together."""
    import pyarrow as pa

    token, number, text = pa.int64(), pa.float64(), pa.string()
    both = {"logprob": number, "processed_logprob": number}
    sequence = {
        "token_ids": pa.list_(token),
        "text": text,
        "finish_reason": text,
        "score": number,
        "logprobs": pa.list_(pa.struct(both)),
        "top_logprobs": pa.list_(pa.list_(pa.struct({"token_id": token, **both}))),
    }
    types = {
        "generated_text": text,
        "generated_tokens": pa.list_(token),
        "num_input_tokens": pa.int64(),
        "num_generated_tokens": pa.int64(),
        "finish_reason": text,
        "sequences": pa.list_(pa.struct(sequence)),
        "prompt_logprobs": pa.list_(number),
        "prompt_top_logprobs": pa.list_(pa.list_(pa.struct({"token_id": token, "logprob": number}))),
        ERROR: text,
    }
    rows = [
        (
            result.text,
            result.token_ids,
            len(result.prompt_ids),
            len(result.token_ids),
            result.finish_reason,
            [{name: getattr(row, name) for name in sequence} for row in result.sequences],
            result.prompt_logprobs,
            result.prompt_top_logprobs,
            _said(result.error),
        )
        for result in results
    ]
    return pa.Table.from_pylist([dict(zip(types, row)) for row in rows], schema=pa.schema(types))
