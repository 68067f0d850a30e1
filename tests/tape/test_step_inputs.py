"""Tensors that decode steps only read, in the buffers of a recorded step."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from hf_paged.tape.static_states import StaticStates
from hf_paged.tape.step_inputs import (
    MAX_BYTES,
    is_row_input,
    note_row_inputs,
    outputs_of,
    passed_inputs,
)

WIDTH = 7  # columns of the rows of `rectangle_of`


def rectangle_of(**inputs: Tensor) -> Any:
    return types.SimpleNamespace(
        blocks=[None, None],
        width=WIDTH,
        cache=None,
        inputs=inputs,
        constant_names={"features"},
        row_inputs=None,
    )


def row_inputs(rectangle: Any, inputs: dict[str, Tensor]) -> Any:
    assert note_row_inputs(rectangle, inputs) is None
    return rectangle.row_inputs


@pytest.mark.parametrize("is_inference", [False, True])
def test_tensors_are_copied_again_only_if_their_content_may_have_changed(
    is_inference: bool,
) -> None:
    rectangle = rectangle_of()
    with torch.inference_mode(is_inference):
        features = torch.ones(2, 3)
    first = row_inputs(rectangle, {"features": features})
    assert first is not None
    static = StaticStates([first], num_rows=4)
    static.move_in([first])
    assert torch.equal(static.buffers[0], torch.tensor([1.0, 1.0, 0.0, 0.0])[:, None].expand(4, 3))
    # writes to a tensor of inference mode cannot be seen
    assert (row_inputs(rectangle, {"features": features}) is first) == (not is_inference)
    assert (row_inputs(rectangle, {"features": features.clone()}) is first) == (not is_inference)
    with torch.inference_mode(is_inference):
        features.add_(1)
    second = row_inputs(rectangle, {"features": features})
    assert second is not None and second is not first
    static.move_in([second])
    assert torch.equal(static.buffers[0][:2], torch.full((2, 3), 2.0))


def test_tensors_that_grow_with_the_rows_are_not_taken() -> None:
    features, grown = torch.ones(2, WIDTH), torch.ones(2, WIDTH)
    rectangle = rectangle_of(features=features, grown=grown)
    assert is_row_input("x", features, rectangle)  # the same in each step
    assert not is_row_input("x", grown, rectangle)
    assert not is_row_input("x", torch.ones(2, 1, 1, WIDTH), rectangle)
    assert is_row_input("x", torch.ones(2, 1, 3), rectangle)
    assert not is_row_input("x", torch.ones(2, 3), rectangle)  # not an input of the step
    assert not is_row_input("x", torch.ones(3, 1), rectangle)
    rectangle.row_inputs = row_inputs(rectangle, {"x": grown})
    assert is_row_input("x", grown, rectangle)  # as in the last step
    reason = note_row_inputs(rectangle, {"x": torch.empty(2, MAX_BYTES, device="meta")})
    assert reason is not None and reason.endswith("take more than 16 MiB")


def test_outputs_that_are_inputs_are_known_after_a_replay() -> None:
    features, other = torch.ones(2, 3), torch.ones(2, 3)
    nested = BaseModelOutput(last_hidden_state=features)
    outputs = ModelOutput(logits=other, image_outputs=nested, hidden_states=(features,))
    passed = passed_inputs(outputs, {"embeddings": features})
    assert passed == {"image_outputs": {"last_hidden_state": "embeddings"}}
    known = outputs_of(passed, {"embeddings": other}, cache="cache")
    assert known.image_outputs.last_hidden_state is other and known.cache == "cache"
    assert "logits" not in known
