"""An interrupt while a step is recorded."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from hf_paged.tape import recorders
from tests.support import models

pytestmark = pytest.mark.usefixtures("sigint")


class Interrupted(TorchDispatchMode):
    """Interrupted as it ends, before it is popped; torch pops and pushes modes for every recorded
    operation."""

    has_ended = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})

    def __exit__(self, *error: object) -> None:
        if not self.has_ended:
            self.has_ended = True
            raise KeyboardInterrupt
        super().__exit__(*error)


def test_an_interrupt_of_a_recording_leaves_no_mode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, modes = models.get("llama"), models.prompt("llama", 1, 9), list[Interrupted]()
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    capture = recorders.Tapes.capture

    def interrupted(*args: Any) -> Any:
        assert torch._C._len_torch_dispatch_stack() == 0
        modes.append(Interrupted())
        with modes[0]:
            signal.raise_signal(signal.SIGINT)
            return capture(*args)

    expected = model.generate(**inputs, **options)
    hf_paged.free(model)  # drops the recordings of other tests
    monkeypatch.setattr(recorders.Tapes, "capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **options, **models.PAGED)
    assert modes[0].has_ended and torch._C._len_torch_dispatch_stack() == 0
    monkeypatch.undo()
    assert torch.equal(model.generate(**inputs, **options, **models.PAGED), expected)
