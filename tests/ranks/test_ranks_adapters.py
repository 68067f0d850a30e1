"""Adapters and drafts on a model sharded over two processes (gloo, on the CPU)."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support import models, ranks
from tests.support.peft_models import active, lora, many

pytest.importorskip("peft")
pytestmark = pytest.mark.slow

NUM_ADAPTERS = 4  # three differ in their targets, and one has a bias
NAMES = [*(f"a{number}" for number in range(NUM_ADAPTERS)), "__base__"]


@functools.cache
def adapted() -> Any:
    model = many(NUM_ADAPTERS - 1)
    targets = ["v_proj", "o_proj", "up_proj", "down_proj"]
    model.add_adapter(f"a{NUM_ADAPTERS - 1}", lora(r=3, lora_bias=True, target_modules=targets))
    return model.eval()


@functools.cache
def found(*cases: str) -> list[dict[str, Any]]:
    return ranks.run(models.get("llama"), *cases, adapters=adapted(), timeout=600.0)


def plain_by_adapter(model: Any, names: list[str]) -> list[dict[str, Any]]:
    """Results of one process, by adapter and options."""
    rows = []
    for adapter in names:
        with active(model, adapter):
            rows.append(ranks.plain_calls(model))
    return rows


@functools.cache
def expected() -> list[dict[str, Any]]:
    return plain_by_adapter(adapted(), NAMES)


def test_rows_with_adapters_in_folders_share_forwards_over_two_processes() -> None:
    first, second = (each["adapter_folders"] for each in found("adapter_folders"))
    assert second["together"] is None
    once, again = first["together"]
    assert once["tokens"] == again["tokens"] == expected()
    assert once["forwards a step"] == 1.0
    assert once["loads"] == again["loads"] == NUM_ADAPTERS and once["evictions"] == 0
    assert again["hits"] == [24] * (NUM_ADAPTERS + 1), "prefixes are kept by adapter"
    assert len({str(rows["greedy"]) for rows in expected()}) == NUM_ADAPTERS + 1, "void"
    short = first["short"]  # with fewer places than adapters
    assert short["tokens"] == [rows["greedy"][:2] for rows in expected()] * 2
    assert short["evictions"] > 0
    # one that another process cannot load fails its requests alone
    unread = list(first["unread"])
    assert "cannot be loaded by processes [1] of 2" in unread.pop(1)
    tokens = [[rows["greedy"][0]] for rows in expected()]
    del tokens[1]
    assert unread == tokens


def test_own_adapters_by_name_give_the_tokens_of_one_process() -> None:
    first, second = (each["own_adapters"] for each in found("own_adapters"))
    alone = [rows for number, rows in enumerate(expected()) if number != ranks.HEADED]
    assert first["plain"] == second["plain"] == alone
    assert first["engine"]["tokens"] == alone and first["engine"]["forwards a step"] == 1.0
    # PEFT (0.21) computes the adapters of a batch in another order in each process, so it sums
    # different ones
    names = [name for number, name in enumerate(NAMES) if number != ranks.HEADED]
    rows = ranks.rows_by_names(adapted(), names)
    for each in (first, second):
        assert each["rows"] == rows and each["road"] == "engine"


def test_drafts_over_two_processes_give_plain_tokens() -> None:
    first = found("drafts")[0]["drafts"]
    model, names = models.get("llama"), NAMES[-len(ranks.REPEATING) :]
    for kind, options in ranks.ONE_ROW.items():
        plain = [ranks.plain(model, prompt, options) for prompt in ranks.REPEATING]
        assert first["ngrams"][kind] == plain
        for place, (name, prompt) in enumerate(zip(names, ranks.REPEATING)):
            with active(adapted(), name):
                alone = ranks.plain(adapted(), prompt, options)
            assert first["adapters"][kind][place] == alone, (name, kind)
    assert first["assistant"]["greedy"] == first["ngrams"]["greedy"]
    for drafted in ("ngrams", "assistant", "adapters"):
        assert first[drafted]["accepted"] > 0


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        # layers with gathered outputs and split inputs
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("mixtral", ["q_proj", "v_proj", "o_proj", "lm_head"]),
    ],
)
def test_families(name: str, targets: list[str]) -> None:
    model = many(2, name, target_modules=targets)
    first, _ = ranks.run(models.get(name), "adapter_folders", adapters=model)
    once, _ = first["adapter_folders"]["together"]
    assert once["tokens"] == plain_by_adapter(model, ["a0", "a1", "__base__"])
    assert once["forwards a step"] == 1.0
