"""The topics of docs/guide/troubleshooting.md. Warnings, errors and the reasons of a [`Route`]
point to them."""

from __future__ import annotations

import enum

_POINTER = "[troubleshooting.md#"


class Topic(enum.Enum):
    """The rows of the table in troubleshooting.md; a topic's value is its row's anchor.
    `Topic.HOOKS("text")` returns the text with a pointer to the row, or the unchanged text if it
    quotes a cause that already has a pointer."""

    ADAPTERS = "adapters"
    ASSISTED = "assisted"
    BATCH = "batch"
    BATCH_INVARIANT = "batch-invariant"
    CACHE = "cache"
    CONTINUOUS_BATCHING = "continuous-batching"
    CPP_KERNELS = "cpp-kernels"
    DEVICES = "devices"
    ENCODER = "encoder"
    FAILED_REQUESTS = "failed-requests"
    GATHERED = "gathered"
    HOOKS = "hooks"
    INPUTS = "inputs"
    MEMORY = "memory"
    MODEL_CODE = "model-code"
    NOT_PAGED = "not-paged"
    OPTIONS = "options"
    OUT_OF_BLOCKS = "out-of-blocks"
    PADDING = "padding"
    POSITIONS = "positions"
    PREFIX_CACHE = "prefix-cache"
    PREFIX_TIERS = "prefix-tiers"
    RANKS = "ranks"
    RECORDING = "recording"
    RIGHT_PADDING = "right-padding"
    ROOMS = "rooms"
    SELF_CHECK = "self-check"
    SERVING = "serving"
    STALLED = "stalled"
    TOKENIZER = "tokenizer"
    TRAINING = "training"
    TRITON = "triton"
    VERSIONS = "versions"
    VIRTUAL_STORAGE = "virtual-storage"

    def __call__(self, text: str) -> str:
        return text if _POINTER in text else f"{text} {_POINTER}{self.value}]"


class TopicError(Exception):
    """The base of hf_paged's errors whose messages contain a pointer to a topic."""

    topic: Topic

    def __str__(self) -> str:
        return self.topic(super().__str__())
