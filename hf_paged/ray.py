"""
Runs one `PagedEngine` in each Ray worker, on one or many machines. Needs the extra `ray`.

    # Ray Data
    ds = ds.map_batches(hf_paged.ray.LLMPredictor,
                        fn_constructor_args=(name, {"max_new_tokens": 64}),
                        concurrency=2, num_gpus=1, batch_size=256)
    # Ray Serve
    app = serve.deployment(hf_paged.ray.LLMServer).bind(name, {"max_new_tokens": 64})

Ray itself starts the workers, assigns devices, restarts workers that died and repeats their
unfinished work.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from .batching.decoding.prepare import check_options
from .batching.engine import PagedEngine
from .batching.results import EngineStats, RequestOutput, RequestResult
from .cache.block_pool import OutOfBlocksError
from .config import is_whole

try:
    import ray  # noqa: F401
except ImportError as error:
    raise ImportError('`hf_paged.ray` needs Ray: pip install "hf_paged[ray]"') from error

ERROR = "__inference_error__"
"""The `ray.data.llm` column with the error of a failed row; empty for other rows."""

_BODY_FIELDS = {"generation_config", "prompt", "seed"}  # fields of an HTTP body besides "stream"


class _Worker:
    """An engine, made in the worker process, and its requests' default generation options."""

    def __init__(
        self,
        model_source: str | Callable[..., PagedEngine],
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        *,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        engine_kwargs = engine_kwargs or {}
        if callable(model_source):
            self.engine = model_source(**engine_kwargs)
        else:
            self.engine = PagedEngine.from_pretrained(model_source, **engine_kwargs)
        if not isinstance(self.engine, PagedEngine):
            raise TypeError(
                f"`model_source` made an object of type {type(self.engine).__name__}: it must be"
                " the name or the folder of a model, or a function that returns a `PagedEngine`"
            )
        # raises for invalid options here, not in each request
        check_options(self.engine.model, generation_config)
        self._default_options = _explicit_options(generation_config)
        if isinstance(generation_config, Mapping):
            # `None` values stay, as in `PagedEngine.add_request`
            self._default_options = dict(generation_config)

    def _merge(self, options: Any) -> Any:
        """Returns the defaults, overridden by a request's options. Returns `options` of an invalid
        type unchanged, so that the engine refuses them."""
        if not isinstance(options, (GenerationConfig, Mapping, type(None))):
            return options
        return {**self._default_options, **_explicit_options(options)}


class LLMPredictor(_Worker):
    """
    A callable class for `ray.data.Dataset.map_batches`: generates tokens for a batch of prompts.

    Each worker creates an engine and runs batches through it. Results keep the order of rows. If a
    row cannot be served, a column holds its error, and the other rows finish. If a worker dies, Ray
    restarts it and repeats its unfinished batches; rows with a seed get the same samples again.

    Prompts are a column of text, token ids or chat messages. By default, two more columns are read
    if they exist. `generation_config`: the row's generation options, which override the options for
    all rows. Nulls, with which Arrow fills missing fields, are ignored. (If rows set different
    options, pass `batch_format="pyarrow"`: NumPy and pandas have no missing integers and convert
    the column to floats.) `seed`: the row's seed for sampling, as in `PagedEngine.add_request`.
    Without seeds, the samples depend on how rows are batched, ordered and repeated.

    The result has the batch's columns and the following, which replace columns of the same names
    (most names are those of `ray.data.llm`): `generated_text`, `generated_tokens` (`list[int64]`),
    `num_generated_tokens` and `finish_reason` of the first sequence, `num_input_tokens`,
    `sequences` (all sequences of the row, as structs with fields of [`SequenceResult`]),
    `prompt_logprobs` and `prompt_top_logprobs` (null unless requested), and `__inference_error__`
    (`"ValueError: ..."`, or empty).

    Args:
        model_source (`str` or callable): A name or folder for `PagedEngine.from_pretrained`, or a
            function that returns a `PagedEngine`; it runs in the worker.
        generation_config ([`GenerationConfig`] or `dict`, *optional*): Options for all rows, which
            override the model's `generation_config`.
        engine_kwargs (`dict`, *optional*): Keyword arguments of `from_pretrained`, or of the
            function: `config`, `tokenizer`, `dtype`, `device_map`, ...
        prompt_column (`str`): The column of prompts.
        row_options (`tuple[str, ...]`): The columns with a row's options: `generation_config`, and
            arguments of `PagedEngine.generate` that may be lists (`adapter`, `schema`, `seed`,
            ...).
        options: Arguments of `PagedEngine.generate` for all rows; a column overrides the argument
            of its name.

    Raises:
        ValueError: for a model or options that `PagedEngine` refuses; in a call, for a batch
            without the prompt column.
        TypeError: for unknown options, or if `model_source` does not return a `PagedEngine`.
        torch.AcceleratorError: in a call, if the process has lost the device.

    Example:

    ```python
    ds = ray.data.from_items([{"prompt": prompt, "seed": i} for i, prompt in enumerate(prompts)])
    ds = ds.map_batches(
        LLMPredictor,
        fn_constructor_args=("Qwen/Qwen3-8B", {"max_new_tokens": 64}),
        concurrency=2,
        num_gpus=1,
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
        self.prompt_column = prompt_column
        self.row_options = row_options
        self.options = options
        self.engine.generate([], **options)  # raises for unknown options

    def __call__(self, batch: Any) -> Any:
        """Returns the batch, with the generated columns, as a `pyarrow.Table`. The batch is a dict
        of arrays, a `pandas.DataFrame` or a `pyarrow.Table`."""
        from ray.data.block import BlockAccessor

        block = BlockAccessor.batch_to_block(batch)
        table = BlockAccessor.for_block(block).to_arrow()
        names = table.column_names
        if self.prompt_column not in names:
            raise ValueError(
                f"the batch has the columns {names}, but no `{self.prompt_column}`: set"
                " `prompt_column`"
            )
        option_columns = [name for name in self.row_options if name in names]
        input_columns = [self.prompt_column, *option_columns]
        accessor = BlockAccessor.for_block(table.select(input_columns))
        rows = list(accessor.iter_rows(public_row_format=True))
        columns: dict[str, Any] = {
            name: [_to_python(row[name]) for row in rows] for name in input_columns
        }
        prompts = columns.pop(self.prompt_column)
        row_configs = columns.pop("generation_config", [None] * len(rows))
        seed = self.options.get("seed")
        if is_whole(seed):
            # the samples must not depend on a row's position in a batch
            columns.setdefault("seed", [seed] * len(rows))
        configs = [self._merge(config) for config in row_configs]
        results = self.engine.generate(prompts, configs, **{**self.options, **columns})
        for result in results:
            if isinstance(result.error, torch.AcceleratorError):
                raise result.error  # the process has lost the device: all rows would fail
        generated_table = _table(results)
        table = table.select([name for name in names if name not in generated_table.column_names])
        for name in generated_table.column_names:
            table = table.append_column(name, generated_table[name])
        return table


class LLMServer(_Worker):
    """A deployment for Ray Serve with one engine per replica:
    `serve.deployment(LLMServer).bind(name)`.

    Through a handle, `handle.options(stream=True).generate.remote(prompt, generation_config)`
    streams outputs. Over HTTP, a POST of `{"prompt": ..., "generation_config": {...}, "seed": ...,
    "stream": true}` returns them as server-sent events of JSON with the fields of
    [`RequestOutput`]; without `stream`, it returns the [`RequestResult`] as JSON. When a client
    disconnects, or a handle's response is cancelled, its request ends and frees its blocks.
    The deployment's `max_ongoing_requests`, by default 5, limits how many requests Serve sends to a
    replica at once: set it to the batch size that the engine should reach.

    Args:
        model_source, generation_config, engine_kwargs (as in [`LLMPredictor`]): Each replica makes
            its engine from these.
    """

    _device_error: Exception | None = None  # the error with which this process lost the device

    async def generate(
        self, prompt: Any, generation_config: Any = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams the outputs of one prompt. `options`: arguments of `PagedEngine.astream`."""
        outputs = self.engine.astream([prompt], [self._merge(generation_config)], **options)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                error = None if output.result is None else output.result.error
                if isinstance(error, torch.AcceleratorError):
                    self._device_error = error
                yield output

    def check_health(self) -> None:
        """Raises the error with which this process lost its device, if any: Serve then starts
        another replica."""
        if self._device_error is not None:
            raise self._device_error

    def stats(self) -> EngineStats:
        """Returns the statistics of this replica's engine."""
        return self.engine.stats()

    async def __call__(self, request: Any) -> Any:
        """Answers a `starlette.requests.Request`. The status is 400 if the request is invalid or
        needs more blocks than the pool has, and 500 if it fails for another reason before anything
        is streamed."""
        from starlette.responses import Response, StreamingResponse

        try:
            body = dict(await request.json())
            is_stream = body.pop("stream", False)
            if not isinstance(is_stream, bool):
                raise ValueError(f"`stream` is {is_stream!r}: it must be true or false")
            unknown = body.keys() - _BODY_FIELDS
            if unknown:
                raise ValueError(
                    f"the body has unknown fields {sorted(unknown)}: the known ones are"
                    f" {sorted(_BODY_FIELDS)} and stream"
                )
            if "prompt" not in body:
                raise ValueError("the body has no `prompt`: pass a text, token ids or messages")
            outputs = self.generate(body.pop("prompt"), **body)
            first_output = await anext(outputs)
        except (KeyError, TypeError, ValueError) as error:  # `JSONDecodeError` is a `ValueError`
            return Response(_json({"error": error}), 400, media_type="application/json")
        result = first_output.result
        has_failed = result is not None and result.error is not None
        if is_stream and not has_failed:
            events = _events(first_output, outputs)
            return StreamingResponse(events, media_type="text/event-stream")
        async for output in outputs:
            result = output.result
        assert result is not None  # the last output has the result
        status = 200 if result.error is None else 500
        if isinstance(result.error, (IndexError, OutOfBlocksError, TypeError, ValueError)):
            status = 400
        return Response(_json(result), status, media_type="application/json")


async def _events(
    first_output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncIterator[str]:
    async with contextlib.aclosing(outputs):
        yield f"data: {_json(first_output)}\n\n"
        async for output in outputs:
            yield f"data: {_json(output)}\n\n"


def _json(value: Any) -> str:
    def default(part: Any) -> Any:
        if isinstance(part, Exception):
            return _error_text(part)
        return vars(part)

    return json.dumps(value, default=default)


def _error_text(error: Exception | None) -> str:
    if error is None:
        return ""
    return f"{type(error).__name__}: {error}"


def _explicit_options(config: GenerationConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the options that a generation config sets, without missing values."""
    options: Mapping[str, Any]
    if isinstance(config, GenerationConfig):
        options = config.to_dict()
    else:
        options = config or {}
    return {name: value for name, value in options.items() if not _is_missing(value)}


def _is_missing(value: Any) -> bool:
    """Whether a value is null: `None`, or NaN, as NumPy and pandas represent it among numbers."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _to_python(value: Any) -> Any:
    """Converts a row's value: arrays to lists, missing values to `None`."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _to_python(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_to_python(part) for part in value]
    if _is_missing(value):
        return None
    return value


def _table(results: list[RequestResult]) -> Any:
    """Makes a `pyarrow.Table` of results. Its types do not depend on the values, so that tables of
    different batches can be concatenated."""
    import pyarrow as pa

    token = pa.int64()
    number = pa.float64()
    text = pa.string()
    logprob_fields = {"logprob": number, "processed_logprob": number}
    top_token = pa.struct({"token_id": token, **logprob_fields})
    top_prompt_token = pa.struct({"token_id": token, "logprob": number})
    sequence = {
        "token_ids": pa.list_(token),
        "text": text,
        "finish_reason": text,
        "score": number,
        "logprobs": pa.list_(pa.struct(logprob_fields)),
        "top_logprobs": pa.list_(pa.list_(top_token)),
    }
    types = {
        "generated_text": text,
        "generated_tokens": pa.list_(token),
        "num_input_tokens": pa.int64(),
        "num_generated_tokens": pa.int64(),
        "finish_reason": text,
        "sequences": pa.list_(pa.struct(sequence)),
        "prompt_logprobs": pa.list_(number),
        "prompt_top_logprobs": pa.list_(pa.list_(top_prompt_token)),
        ERROR: text,
    }
    rows = []
    for result in results:
        sequences = [{name: getattr(row, name) for name in sequence} for row in result.sequences]
        values = (
            result.text,
            result.token_ids,
            len(result.prompt_ids),
            len(result.token_ids),
            result.finish_reason,
            sequences,
            result.prompt_logprobs,
            result.prompt_top_logprobs,
            _error_text(result.error),
        )
        rows.append(dict(zip(types, values)))
    return pa.Table.from_pylist(rows, schema=pa.schema(types))
