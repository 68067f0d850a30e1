"""What the kernels take. Needs no Triton."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of queries, keys and values that the kernels take; products of float32 are exact ("ieee"), not TF32."""

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MAX_DIM = 576
"""Of keys, and of values in the decode kernel."""

MAX_QUERIES = 16
"""Queries of a row up to which the decode kernel packs them beside the heads of a group."""

MAX_BATCH = 8192
"""Rows of a call of the decode kernel; each program reads all their lengths."""
