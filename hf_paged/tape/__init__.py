"""Records steps and replays them, as tapes of operations on the CPU and as CUDA graphs on a GPU.
Also speeds up half-precision matrix products outside replays, and makes forwards batch-invariant.
Implements `seams.Recorder`. Of the optional packages, imports only `rectangles`, for its steps."""

from __future__ import annotations

from .graphs import make_recorder as make_recorder
from .invariant import batch_invariant_operations as batch_invariant_operations
from .invariant import in_fixed_order as in_fixed_order
from .products import kernel_products as kernel_products
