"""An interrupt while a step is recorded."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.tape import recorders
from tests.support import models

pytestmark = pytest.mark.usefixtures("sigint")


def test_an_interrupt_of_a_recording_leaves_no_mode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch pops and pushes modes for every recorded operation."""
    model, reached, original = models.build("llama"), [], recorders.Tapes.capture
    prompt = models.token_ids(1, 9)

    def capture(*args: Any) -> Any:
        reached.append(torch._C._len_torch_dispatch_stack())
        with _Mode():
            signal.raise_signal(signal.SIGINT)
            return original(*args)

    class _Mode(TorchDispatchMode):
        """Interrupted as it ends, before it is popped."""

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return function(*args, **kwargs or {})

        def __exit__(self, *error: object) -> None:
            if not reached[1:]:
                reached.append("exit")
                raise KeyboardInterrupt
            super().__exit__(*error)

    expected = model.generate(prompt, max_new_tokens=24, do_sample=False)
    monkeypatch.setattr(recorders.Tapes, "capture", capture)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt, max_new_tokens=24, do_sample=False, **models.PAGED)
    assert reached == [0, "exit"] and torch._C._len_torch_dispatch_stack() == 0
    monkeypatch.undo()
    assert torch.equal(
        model.generate(prompt, max_new_tokens=24, do_sample=False, **models.PAGED), expected
    )
