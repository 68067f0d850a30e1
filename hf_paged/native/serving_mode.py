"""The mode in which continuous batching serves models: evaluation mode, with attention that
`PagedEngine` can replace."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .. import compat, forks
from ..interrupts import restoring
from ..model.forwards import compute_device
from ..switches import NOTHING

# prefix of attention implementations that only transformers' own loop can call
NATIVE_ATTENTION_PREFIX = "paged|"


class _ServedModel:
    """The training modes and attention implementations of a model in `serving_mode`, to be restored
    when it ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.num_contexts = 0
        self.training_modules: list[torch.nn.Module] = []
        self.attention_names: list[tuple[PreTrainedConfig, str]] = []
        for module in model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                name = compat.attention_of(config)
                if isinstance(name, str) and name.startswith(NATIVE_ATTENTION_PREFIX):
                    self.attention_names.append((config, name))

    def enter(self, model: PreTrainedModel) -> None:
        """Begins a context: sets evaluation mode, and attention that an engine can replace."""
        self.num_contexts += 1
        self.set_eval_mode(model)
        for config, name in self.attention_names:
            compat.set_attention(config, name.removeprefix(NATIVE_ATTENTION_PREFIX))

    def leave(self, model: PreTrainedModel) -> None:
        """Ends a context; after the last one, restores training mode and attention."""
        self.num_contexts -= 1
        if self.num_contexts > 0:
            return
        # a training mode that a caller has set meanwhile stays as it is
        if not _training_modules(model):
            for module in self.training_modules:
                module.training = True
        for config, name in self.attention_names:
            compat.set_attention(config, name)

    def set_eval_mode(self, model: PreTrainedModel) -> None:
        """Sets evaluation mode, and records which modules were in training mode, if any were."""
        self.training_modules = _training_modules(model) or self.training_modules
        model.eval()


def _training_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if module.training]


_served_models: weakref.WeakKeyDictionary[PreTrainedModel, _ServedModel]
_served_models = weakref.WeakKeyDictionary()
_served_lock = forks.lock()


def set_eval_mode_again(model: PreTrainedModel) -> None:
    """Sets evaluation mode again within `serving_mode`. If a caller has set training mode
    meanwhile, the end of `serving_mode` restores training mode."""
    _served_models[model].set_eval_mode(model)


@restoring
def serving_mode(model: PreTrainedModel) -> Iterator[None]:
    """A context that prepares a model as transformers' continuous batching does: sets evaluation
    mode, and replaces attention implementations named `paged|...`, which only transformers' own
    loop can call, by the implementation after the prefix. If contexts overlap, the last one to exit
    restores both."""
    device = compute_device(model)
    entered_models = list[_ServedModel]()  # empty if an error interrupts entering
    try:
        with _served_lock:
            state = _served_models.setdefault(model, _ServedModel(model))
            entered_models.append(state)
            state.enter(model)
        # each thread has its own current device
        with torch.cuda.device(device) if device.type == "cuda" else NOTHING:
            yield
    finally:
        with _served_lock:
            for state in entered_models:
                if state.num_contexts <= 1:  # 0 if an interrupt came before `enter` counted it
                    del _served_models[model]
                state.leave(model)
