"""Recorded steps (`Recorder`): tapes on the CPU, which one C++ call replays, and CUDA graphs on a
GPU; also faster half-precision products outside replays, and batch-invariant forwards. Imports no
other room."""

from __future__ import annotations

from .graphs import recorder as recorder
from .invariant import by_kernels as by_kernels
from .invariant import in_fixed_order as in_fixed_order
from .products import own_products as own_products
