"""What the kernels take. Needs no Triton."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of queries, keys and values; products of float32 are exact
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MAX_DIM = 576  # of keys, and of values in decodes
MAX_QUERIES = 16  # of a row of a decode: they are packed beside the heads of a group
MAX_BATCH = 8192  # rows of a decode, of which each program reads all lengths
