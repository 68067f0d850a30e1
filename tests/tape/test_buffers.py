"""The buffers of a recording: which storage a tensor lies in, and at which address."""

from __future__ import annotations

import torch

from hf_paged.tape.buffers import Buffers


def test_a_known_storage_keeps_its_id_at_a_fixed_address() -> None:
    buffers = Buffers()
    known, other = torch.zeros(4), torch.zeros(4)
    buffers.add(known)
    buffers.add_fixed(known)
    buffers.add(other)
    assert buffers.fixed_addresses == {0: known.data_ptr()}, "the other one has no address"
    assert (buffers.id_of(known), buffers.id_of(other)) == (0, 1)


def test_an_empty_storage_has_no_buffer() -> None:
    buffers, empty = Buffers(), torch.zeros(0)
    buffers.add_fixed(empty)
    assert buffers.id_of(empty) is None and not buffers.fixed_addresses and not buffers.num_bytes
