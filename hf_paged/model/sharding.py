"""Models that are sharded over several processes, which compute every forward together. The
optional package `ranks` implements the messages between the processes."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from .. import compat
from ..config import PagedConfig
from ..rooms import is_installed, room
from ..seams import Leader, Processes
from ..switches import NOTHING
from ..topics import Topic, TopicError


class RankLostError(TopicError, RuntimeError):
    """A process that holds a shard of the model has ended or is out of step with the others, so the
    processes can compute no more forwards together."""

    topic = Topic.RANKS


def is_sharded(model: nn.Module) -> bool:
    """Whether several processes compute every forward of the model together."""
    return compat.shard_ranks(model) is not None


def _ranks() -> Any:
    return room("ranks", "a model in shards over several processes")


def processes_of(model: nn.Module) -> Processes | None:
    """Returns the processes that compute the model's forwards together; `None` if this process
    computes them alone. The first call is collective: all processes must make it. Raises
    `ValueError` if the model's K/V heads cannot be divided evenly among them."""
    return _ranks().processes_of(model) if is_sharded(model) else None


def lead(model: nn.Module, config: PagedConfig, owner: Any) -> Leader | None:
    """Returns the [`Leader`] through which an engine with this config drives the other processes
    that hold shards of the model; `None` if the model is not sharded. The leader is closed when
    `owner` is garbage-collected. Raises `ValueError` in processes other than 0."""
    return _ranks().lead(model, config, owner) if is_sharded(model) else None


def reserving(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context that reserves a sharded model for a call. Raises `RuntimeError` while a call of
    another thread, or an engine, uses the model. For other models, it does nothing."""
    return _ranks().reserving(model) if is_sharded(model) else NOTHING


def deferring_signals(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context for a call that all processes of a sharded model make together: defers signals
    until the context ends. For other models, and without the optional package `ranks`, it does
    nothing."""
    if not is_sharded(model) or not is_installed("ranks"):
        return NOTHING
    return _ranks().deferring_signals()


def serve_rank(model: Any) -> None:
    """Serves a [`PagedEngine`] of process 0 in the other processes that hold shards of its model
    (from `from_pretrained(..., tp_plan="auto")` under `torchrun`). Returns when that engine is
    closed (at the end of its `with`) or garbage-collected; Ctrl-C waits for that.

        if torch.distributed.get_rank() == 0:
            with hf_paged.PagedEngine(model, tokenizer=tokenizer) as engine:
                results = engine.generate(prompts, {"max_new_tokens": 64})
        else:
            hf_paged.serve_rank(model)

    Args:
        model ([`PreTrainedModel`] or `PeftModel`): This process's shard, in the same mode (train
            or eval) as the shard of process 0.

    Raises:
        ValueError: in process 0, and for a model that is not sharded.
        RuntimeError: while another call of this process uses the model.
        RankLostError: if another process has ended, or is out of step with the others.
    """
    _ranks().serve(model)
