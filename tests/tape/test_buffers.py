"""The buffers of a recording: which storage a tensor lies in, and at which address."""

from __future__ import annotations

import torch

from hf_paged.tape.values import Values


def test_a_known_storage_keeps_its_number_at_a_fixed_address() -> None:
    values = Values()
    known, other = torch.zeros(4), torch.zeros(4)
    values.add(known)
    values.add_outside(known)
    values.add(other)
    assert values.fixed == {0: known.data_ptr()}, "the other one has no address"
    assert (values.number(known), values.number(other)) == (0, 1)


def test_an_empty_storage_has_no_number() -> None:
    values, empty = Values(), torch.zeros(0)
    values.add_outside(empty)
    assert values.number(empty) is None and not values.fixed and not values.sizes
