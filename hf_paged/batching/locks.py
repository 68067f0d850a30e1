"""One forward of the engine at a time through a model, whichever memory it writes to: adapters are the model's."""

from __future__ import annotations

import threading
import weakref

from torch import nn

_guard = threading.Lock()
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def step_lock(model: nn.Module) -> threading.RLock:
    """Held from scheduling to the end of the forward, and while the model's state is read or checked."""
    with _guard:
        if model not in _locks:
            _locks[model] = threading.RLock()
        return _locks[model]
