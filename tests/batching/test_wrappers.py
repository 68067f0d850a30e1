"""Wrappers of models: engines and the pool's functions find the model inside, or refuse the wrapper
by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_paged
from hf_paged import PagedEngine
from tests.support import models

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
PROMPT = list(range(5, 29))
CONFIG = {"block_size": 8}


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def build() -> Any:
    return models.build("llama", num_hidden_layers=1)


def tokens(model: Any) -> list[int]:
    new: list[int] = model.generate(torch.tensor([PROMPT]), **GREEDY)[0, len(PROMPT) :].tolist()
    return new


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def with_peft(model: Any, mixed: bool = True) -> Any:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"])
    return peft.get_peft_model(model, lora, mixed=mixed).eval()


WRAPS: dict[str, Callable[[Any], Any]] = {
    "mixed": with_peft,
    "peft in data": lambda model: nn.DataParallel(with_peft(model, mixed=False)),
    "data compiled": lambda model: compiled(nn.DataParallel(model)),
    "all": lambda model: compiled(with_peft(model)),
    "distributed": nn.parallel.DistributedDataParallel,
}


@pytest.mark.parametrize("name", WRAPS)
def test_the_model_inside_serves(name: str, tmp_path: Path, process_group: None) -> None:
    model = build()
    expected, wrapper = tokens(model), WRAPS[name](model)
    model.generate(torch.tensor([PROMPT]), **GREEDY, **models.PAGED)
    assert hf_paged.memory_stats(wrapper).peak_bytes
    assert hf_paged.last_route(wrapper) == hf_paged.last_route(model)
    hf_paged.check_integrity(wrapper)
    hf_paged.free(wrapper)
    assert not hf_paged.memory_stats(wrapper).peak_bytes
    with PagedEngine(wrapper, CONFIG) as engine, PagedEngine(model, CONFIG) as other:
        assert engine.model is model
        (result,) = engine.generate([PROMPT], GREEDY)
        assert result.error is None and result.token_ids == expected
        path = tmp_path / "prefix"
        assert engine.save_prefix(PROMPT, path) == other.load_prefix(path) == len(PROMPT)
        assert other.generate([PROMPT], GREEDY)[0].num_prefix_hit_tokens


def test_fsdp_is_refused_by_name(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    in_place, by_layers = build(), build()
    fully_shard(in_place, mesh=mesh)
    fully_shard(by_layers.model.layers[0], mesh=mesh)
    for model in (
        FullyShardedDataParallel(build(), device_id=torch.device("cpu")),
        in_place,
        by_layers,
    ):
        told = rf"the model of type {type(model).__name__} is sharded by FSDP.*synced_gpus"
        with pytest.raises(ValueError, match=told):
            PagedEngine(model)
