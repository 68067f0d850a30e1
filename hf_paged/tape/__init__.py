"""Recorded steps (`Recorder`): on the CPU as tapes, which one C++ call runs again, on a GPU as CUDA
graphs; half-precision products in forwards that are no replays; forwards in a fixed order. Imports
no other room."""

from __future__ import annotations

from .graphs import recorder as recorder
from .invariant import by_kernels as by_kernels
from .invariant import in_fixed_order as in_fixed_order
from .products import own_products as own_products
