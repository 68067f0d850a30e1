"""PEFT's LoRA adapters for a model's requests: rows with different adapters share packed forwards,
and the weights of adapters in folders are charged to the block pool. Implements
`rooms.AdaptersRoom`; imports no other optional package."""

from .call_names import row_adapters, wrapper_methods
from .files import resolve_adapter
from .loop_adapters import LoopAdapters as make_adapters
from .peft_models import check_served, check_wrapped, has_activated_lora, use_adapter

__all__ = [
    "check_served",
    "check_wrapped",
    "has_activated_lora",
    "make_adapters",
    "resolve_adapter",
    "row_adapters",
    "use_adapter",
    "wrapper_methods",
]
