"""
What of a model decides what its forward computes, and whether it is what it was: K/V of an earlier call may be served,
and a recorded graph replayed, as long as it is.
"""

from __future__ import annotations

import hashlib
import logging
import marshal
import operator
import random
import types
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..attention.switch import model_attention, switchable_configs
from ..cache.memory import autocast_dtype
from .tensor_hash import hash_tensors
from .walk import MARSHAL_VERSION, ModelWalk

logger = logging.getLogger(__name__)

LINE = 64  # bytes of a cache line

_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that cannot be read, once that is said


def read_state(model: nn.Module) -> ModelState | None:
    """Everything about `model` but the content of its tensors; `None` if some of it cannot be read."""
    state = ModelState(model)
    try:
        state.read()
    except Exception as error:  # reading a model's state fails no call
        logger.debug("the state of %s cannot be read: %s", type(model).__name__, error)
        return None
    return state


def fingerprint(model: nn.Module) -> bytes | None:
    """
    [`ModelState.fingerprint`] of the model as it is now, or `None` if it cannot be read, which is said once for each
    model; nothing may be served then.
    """
    try:
        return ModelState(model).fingerprint()
    except Exception as error:  # no such operation for a dtype or a device, no memory, code of the user's
        if model not in _told:
            _told.add(model)
            logger.warning(
                "Prefix caching is off for this %s, since whether it changes cannot be read: %s",
                type(model).__name__,
                error,
            )
        return None


class ModelState:
    """
    A model as it was when it was first asked about. Modules may change at any time: a state is asked within one window
    in which no code of the user's runs.

    `fingerprint`, `addresses` and `is_same` cover names, shapes and dtypes of all parameters, buffers, tensors and
    arrays that are plain attributes; all attributes of modules and configs that are Python scalars, nested containers
    of them (the active, disabled and merged adapters of PEFT among them) or objects of the user's own classes; the
    functions and scalars of modules' classes; functions that replace `forward` or hook into it, with the scalars,
    tensors and functions they close over; train or eval mode where code of the user's own classes looks at it. Not
    covered is what such code reads elsewhere: globals of Python modules, files, attributes of objects that libraries
    made. Comparable within one process only.

    Tensors that are tied are read once. Subclasses of `Tensor` (quantised or sharded weights) are read by
    `__tensor_flatten__`. Those without it, sparse tensors and those without content (meta) raise `UnreadableError`;
    code of the user's that is asked for its parts may raise others.

    Attributes:
        modules (`list[tuple[str, nn.Module]]`): By name.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.modules: list[tuple[str, nn.Module]] = list(model.named_modules())
        self._watch: _Watch | None = None
        # no `functools.cached_property`, whose lock a child process may find held
        self._configs: list[PreTrainedConfig] | None = None
        self._walked: ModelWalk | None = None

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The configs that a call switches to our attention."""
        if self._configs is None:
            self._configs = switchable_configs(module for _, module in self.modules)
        return self._configs

    @property
    def _walk(self) -> ModelWalk:
        if self._walked is None:
            self._walked = ModelWalk(self.model)
        return self._walked

    @property
    def tensors(self) -> list[Tensor]:
        """The distinct tensors, in the order met."""
        return self._walk.tensors

    def read(self) -> None:
        """Reads all but the content of tensors now. Raises what the class says."""
        _ = self._walk

    def code(self) -> Hashable:
        """
        What a forward computes but for the numbers in it, as far as it can be told in a millisecond. Another when a
        module is replaced or added (an adapter), a function of a module's class is replaced, a module's attribute that
        is a bool or a string is another, or attention, dtype, autocast, device or mode is.
        """
        modules = tuple((type(module), module.training) for _, module in self.modules)
        switches = tuple(x for _, module in self.modules for x in vars(module).values() if type(x) in (bool, str))
        classes = dict.fromkeys(base for kind, _ in modules for base in kind.__mro__)
        functions = tuple(x for base in classes for x in vars(base).values() if isinstance(x, types.FunctionType))
        attention = tuple(map(model_attention, self.configs))
        device = self.model.device
        return modules, switches, functions, attention, self.model.dtype, autocast_dtype(device), device

    def fingerprint(self) -> bytes:
        """32 bytes that are the same as long as all that is covered and the content of all tensors is."""
        with torch.no_grad():
            return self._digest(hash_tensors(self.tensors))

    def addresses(self) -> bytes:
        """
        32 bytes that are the same as long as all that is covered, the address of every tensor, and train or eval mode
        of every module is. The content of the tensors may be another.
        """
        return self._digest([[x.data_ptr() for x in self.tensors], [module.training for _, module in self.modules]])

    def _digest(self, content: list[Any]) -> bytes:
        found = self._walk.structure + marshal.dumps(content, MARSHAL_VERSION)
        return hashlib.blake2b(found, digest_size=32).digest()

    def watch(self) -> None:
        """`is_same` compares with the model as it is now. Holds the memory of the tensors."""
        self._watch = _Watch(self._walk)

    def is_same(self) -> bool:
        """
        Whether a look of microseconds finds the model as it was at `watch`: which modules and tensors there are, their
        versions and addresses, which adapters are active, and, on the CPU, one cache line of each tensor at a place
        that chance has chosen. Of writes that move neither version nor address it sees those to whole tensors (an
        optimizer's, a merge's), and may miss those to a few elements.
        """
        assert self._watch is not None, "nothing is watched"
        return self._watch.is_same()


class _Watch:
    """What can be looked at in microseconds."""

    def __init__(self, walk: ModelWalk) -> None:
        modules, chance = [item for item in walk.objects if isinstance(item, nn.Module)], random.Random(0)
        self._held = [held for x in modules for held in (x._modules, x._parameters, x._buffers) if held]
        adapters = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of PEFT's layers
        self._layers = [vars(x) for x in modules if any(name in vars(x) for name in adapters)]
        self._tensors = walk.all_tensors
        self._counted = [x for x in walk.all_tensors if not x.is_inference()]
        self._lines = [_line(x, chance) for x in walk.tensors if x.is_cpu and x.nbytes]
        self._parts, self._content = self._read_parts(), self._read_content()

    def is_same(self) -> bool:
        parts = self._read_parts()
        is_same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        return is_same and self._read_content() == self._content

    def _read_parts(self) -> list[Any]:
        return [part for held in self._held for part in held.values()]

    def _read_content(self) -> tuple[Any, ...]:
        adapters = [
            (str(layer.get("_active_adapter")), layer.get("_disable_adapters"), str(layer.get("merged_adapters")))
            for layer in self._layers
        ]
        versions, places = [x._version for x in self._counted], list(map(Tensor.data_ptr, self._tensors))
        return versions, places, adapters, b"".join(self._lines)


def _line(tensor: Tensor, chance: random.Random) -> memoryview:
    """Up to `LINE` bytes of the tensor's memory, which stays where it is as long as they are held."""
    storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    size = min(tensor.nbytes, storage.nbytes() - start)  # expanded tensors hold less than they have
    first = start + chance.randrange(max(1, size - LINE + 1))
    found = torch.empty(0, dtype=torch.uint8).set_(storage, first, (min(LINE, start + size - first),))
    return memoryview(found.numpy())
