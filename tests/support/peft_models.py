"""Models with LoRA adapters of PEFT; skips the tests of whoever imports it without PEFT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import models
from tests.support.checks import model_state
from tests.support.engine_helpers import lone_run

peft = pytest.importorskip("peft")

ADAPTERS = ("first", "second", "__base__")
TARGETS = (
    ["q_proj", "v_proj"],
    ["gate_proj", "down_proj", "lm_head"],
    ["k_proj", "o_proj", "up_proj"],
)


def lora(**options: Any) -> Any:
    targets = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **targets)


def lora_model(name: Any = "llama", **options: Any) -> Any:
    """A model with two adapters of different rank and target modules; the first is active. `name`
    may be a model."""
    torch.manual_seed(0)
    base = models.build(name) if isinstance(name, str) else name
    model = peft.get_peft_model(base, lora(**options), adapter_name="first")
    model.add_adapter("second", lora(r=2, target_modules=["k_proj", "v_proj"]))
    return model.eval()


@contextlib.contextmanager
def active(model: Any, adapter: str) -> Iterator[None]:
    """PEFT's way to run with one adapter."""
    if adapter == "__base__":
        with model.disable_adapter():
            yield
        return
    before = model.active_adapter
    model.set_adapter(adapter)
    yield
    model.set_adapter(before)


def lone_with(
    model: Any, adapter: str, prompt: list[int], options: dict[str, Any], seed: int | None = None
) -> Any:
    with active(model, adapter):
        return lone_run(model, prompt, options, seed)


def peft_state(model: Any) -> dict[str, Any]:
    layers = [layer for layer in model.modules() if hasattr(layer, "_disable_adapters")]
    return {
        "layers": [(layer._active_adapter, layer._disable_adapters) for layer in layers],
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "active": model.active_adapter,
        **model_state(model.get_base_model()),
    }


def many(count: int, name: str = "llama", **options: Any) -> Any:
    """Adapters `a0`, `a1`, ... that differ in rank, scaling and targets."""
    torch.manual_seed(0)
    model = models.build(name)
    made: Any = None
    for i in range(count):
        own = dict(r=1 + i % 8, lora_alpha=2 * i + 3, use_rslora=i % 2 == 1)
        config = lora(**{**own, "target_modules": TARGETS[i % 3], **options})
        if made is None:
            made = peft.get_peft_model(model, config, adapter_name="a0")
        else:
            made.add_adapter(f"a{i}", config)
    return made.eval()


def saved(model: Any, folder: Path) -> list[str]:
    """The model's adapters as folders, sorted by name."""
    model.save_pretrained(folder, save_embedding_layers=False)
    names = sorted(model.peft_config, key=lambda name: int(name[1:]))
    return [str(folder / name) for name in names]
