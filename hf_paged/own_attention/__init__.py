"""Packed steps of models whose own code computes attention, without the attention interface (BLOOM,
MPT). Implements `rooms.OwnAttentionRoom`; imports no other optional package."""

from .scores import row_tensors as row_tensors
from .scores import with_key_len as with_key_len
