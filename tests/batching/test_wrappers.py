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


def peft_model(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).eval()


def peft_mixed(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]), mixed=True).eval()


WRAPS: list[Callable[[Any], Any]] = [
    compiled,
    nn.DataParallel,
    peft_mixed,
    lambda model: nn.DataParallel(peft_model(model)),
    lambda model: compiled(nn.DataParallel(model)),
    lambda model: compiled(peft_mixed(model)),
]


def check(wrapper: Any, model: Any, path: Path) -> None:
    expected = tokens(model)
    model.generate(torch.tensor([PROMPT]), **GREEDY, **models.PAGED)
    assert hf_paged.memory_stats(wrapper).peak_bytes and hf_paged.last_route(
        wrapper
    ) == hf_paged.last_route(model)
    hf_paged.check_integrity(wrapper)
    hf_paged.free(wrapper)
    assert not hf_paged.memory_stats(wrapper).peak_bytes
    with PagedEngine(wrapper, CONFIG) as engine, PagedEngine(model, CONFIG) as other:
        assert engine.model is model
        (result,) = engine.generate([PROMPT], GREEDY)
        assert result.error is None and result.token_ids == expected
        assert engine.save_prefix(PROMPT, path) == other.load_prefix(path) == len(PROMPT)
        assert other.generate([PROMPT], GREEDY)[0].num_prefix_hit_tokens


@pytest.mark.slow_cases("compiled")
@pytest.mark.parametrize(
    "wrap", WRAPS, ids=["compiled", "data", "mixed", "peft in data", "data compiled", "all"]
)
def test_the_model_inside_serves(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    model = build()
    check(wrap(model), model, tmp_path / "prefix")


def test_distributed_data_parallel(process_group: None, tmp_path: Path) -> None:
    model = build()
    check(nn.parallel.DistributedDataParallel(model), model, tmp_path / "prefix")


@pytest.mark.parametrize("kind", ["wrapper", "in place", "layers"])
def test_fsdp_is_refused_by_name(kind: str, process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = build()
    if kind == "wrapper":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        fully_shard(
            model if kind == "in place" else model.model.layers[0],
            mesh=init_device_mesh("cpu", (1,)),
        )
    with pytest.raises(
        ValueError, match=rf"`model` is a {type(model).__name__} that FSDP has sharded.*synced_gpus"
    ):
        PagedEngine(model)
