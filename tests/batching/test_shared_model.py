"""Several callers on one model: threads, adapters, autocast, writes to returned caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedEngine
from hf_paged.cache.groups import GroupSpec
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import lone_run, run_all
from tests.support.rooms import needs_fingerprints

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 25}


@pytest.mark.slow
def test_an_adapter_of_one_engine_is_not_seen_by_other_callers() -> None:
    """The active adapter is state of the model, so one forward runs at a time, for any caller."""
    adapters = pytest.importorskip("tests.support.peft_models")
    model, (prompt,) = adapters.many(2), models.token_ids(1, 40).tolist()
    names = list(model.peft_config)
    plain = {name: adapters.lone_with(model, name, prompt, GREEDY) for name in names}
    assert plain[names[0]] != plain[names[1]]
    model.set_adapter(names[0])

    def engine(name: str) -> None:
        with PagedEngine(model, {"block_size": 8}) as engine:
            for _ in range(6):
                (result,) = engine.generate([prompt], GREEDY, adapter=name)
                assert [result.token_ids] == plain[name], name

    def generate() -> None:
        for _ in range(6):
            assert lone_run(model, prompt, GREEDY, **models.PAGED) == plain[names[0]]

    in_threads(lambda: engine(names[1]), lambda: engine(names[0]), generate)
    assert model.active_adapter == names[0]


def test_writing_to_a_returned_cache_leaves_the_prefix_cache_alone() -> None:
    """A full block that is cropped and filled again is copied first: the prefix index holds its old
    tokens."""
    model, inputs = models.build("llama"), models.prompt("llama", 2, 40)
    expected = model.generate(**inputs, **GREEDY)
    for _ in range(2):
        output = model.generate(**inputs, **GREEDY, **models.PAGED, return_dict_in_generate=True)
        assert torch.equal(expected, output.sequences)
        cache = output.past_key_values
        cache.crop(-(cache.get_seq_length() - 12))  # into the middle of the second block
        with torch.no_grad():
            model(models.token_ids(2, 9, seed=7), past_key_values=cache)
        hf_paged.check_integrity(model)
        del output, cache
        assert torch.equal(expected, model.generate(**inputs, **GREEDY, **models.PAGED))


@needs_fingerprints
@pytest.mark.parametrize("first", [True, False])
def test_requests_are_computed_in_the_precision_in_which_they_were_added(first: bool) -> None:
    """Autocast is per thread, and another may take the steps: no request joins others of another
    precision, and none finds their prefixes."""
    model, (prompt,) = models.build("llama"), models.token_ids(1, 40).tolist()
    with PagedEngine(model, {"block_size": 8}) as engine:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
            engine.add_request(prompt, GREEDY)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not first):
            with pytest.raises(ValueError, match="autocast uses"):
                engine.add_request(prompt, GREEDY)
            run_all(engine)
            layer = engine.memory.groups[GroupSpec()].storage.layers[0]
            assert layer.values.dtype == (torch.bfloat16 if first else torch.float32)
            for num_hits in (0, 32):
                (result,) = engine.generate([prompt], GREEDY)
                assert result.num_prefix_hit_tokens == num_hits
                assert not first or [result.token_ids] == lone_run(model, prompt, GREEDY)
