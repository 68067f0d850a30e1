"""Rotary embeddings whose factors depend on the longest position of a forward (dynamic NTK,
LongRoPE)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .. import compat
from ..interrupts import restoring
from .writes import restore_attributes


class LengthRope:
    """Gives each token of a packed forward the rotary factors of its sequence. These are the
    factors of the forward that first computes the token in plain `generate`: for prompt tokens the
    factors of the prompt's length, for a later token those of the length including it. The shortest
    length with some factors identifies them; 0 stands for short sequences.
    """

    def __init__(
        self, model: PreTrainedModel, kinds: dict[nn.Module, list[tuple[str, int]]]
    ) -> None:
        """`kinds`: for each rotary embedding its types, each with the length up to which it has the
        factors of short sequences."""
        self._modules = list(kinds)
        limits = {kind_and_limit for of_module in kinds.values() for kind_and_limit in of_module}
        # beyond these limits, every length has different factors
        self._dynamic = sorted(limit for kind, limit in limits if kind != "longrope")
        self._limits = sorted((limit for _, limit in limits), reverse=True)
        self.restarts = any(_drops_cache(model, limit) for limit in self._limits)
        """Whether plain `generate` recomputes all tokens when a sequence's factors change."""

    def factors(self, length: int) -> int:
        """Identifies the factors of a forward of this length."""
        if self._dynamic and length > self._dynamic[0]:
            return length
        return next((limit + 1 for limit in self._limits if length > limit), 0)

    def token_factors(
        self, first: int, end: int, num_prompt_tokens: int, num_tokens: int
    ) -> list[int]:
        """Identifies the factors of tokens `[first, end)` of a sequence of `num_tokens`, prompt
        included."""
        if self.restarts:
            return [self.factors(num_tokens)] * (end - first)
        return [
            self.factors(max(num_prompt_tokens, position + 1)) for position in range(first, end)
        ]

    @property
    def is_fresh(self) -> bool:
        """Whether the modules hold the factors of short sequences."""
        return not any(
            name.endswith("max_seq_len_cached") and int(value) > module.original_max_seq_len
            for module in self._modules
            for name, value in vars(module).items()
        )

    @restoring
    def rotating(self, factors: list[int]) -> Iterator[None]:
        """A context for a packed forward of tokens with these factors; without any, the modules use
        the factors that they hold. It leaves the modules unchanged: the forward writes to copies of
        their buffers."""
        indices: dict[int, list[int]] = {}
        for index, kind in enumerate(factors):
            indices.setdefault(kind, []).append(index)
        rotate = functools.partial(_rotate, indices)
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                for attributes in (vars(module), module._buffers):
                    stack.callback(restore_attributes, attributes, dict(attributes))
                module._buffers.update(
                    {name: x if x is None else x.clone() for name, x in module._buffers.items()}
                )
                if indices:
                    stack.callback(module.register_forward_hook(rotate, with_kwargs=True).remove)
            yield


def _rotate(
    indices: dict[int, list[int]],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    """A forward hook: calls the module once for the tokens of each kind of factors, followed by a
    position that selects the factors. `indices`: those of the tokens, by kind."""
    kwargs = dict(kwargs)
    x, positions, *others = (
        *args,
        *(kwargs.pop(name) for name in ("x", "position_ids") if name in kwargs),
    )
    outputs: list[Any] = []
    order: list[int] = []
    for kind in sorted(indices):
        # resets the module to the factors of a short sequence
        module.forward(x, torch.zeros_like(positions[..., :1]), *others, **kwargs)
        chosen = positions[..., torch.tensor(indices[kind], device=positions.device)]
        longest = torch.full_like(chosen[..., :1], max(kind - 1, 0))
        ending = torch.cat([chosen, longest], dim=-1)
        outputs.append(module.forward(x, ending, *others, **kwargs))
        order += indices[kind]
    back = torch.tensor(order, device=positions.device).argsort()

    def join(*tables: Tensor) -> Tensor:
        return torch.cat([table[..., :-1, :] for table in tables], dim=-2)[..., back, :]

    return tree_map(join, *outputs)


def find_length_rope(model: PreTrainedModel, modules: Iterable[nn.Module]) -> LengthRope | None:
    """The [`LengthRope`] of a model; `None` if its factors are the same for all lengths. Raises the
    errors of the model's `prepare_inputs_for_generation`."""
    limits: dict[nn.Module, list[tuple[str, int]]] = {}
    for module in modules:
        for layer_type, kind in length_types(module):
            if kind == "longrope":
                parameters: Any = module.config.rope_parameters
                if layer_type is not None:
                    parameters = parameters[layer_type]
                limit = parameters["original_max_position_embeddings"]
            else:
                limit = module.original_max_seq_len
            limits.setdefault(module, []).append((kind, int(limit)))
    return LengthRope(model, limits) if limits else None


def length_types(module: nn.Module) -> list[tuple[str | None, str]]:
    """The types of a rotary embedding whose factors depend on the length; each with the type of
    layers that has it, if layers differ."""
    types: Any = compat.attribute(module, "rope_type")
    if not types:  # the usual case
        return []
    by_layer = types if isinstance(types, dict) else {None: types}
    return [
        (layer_type, kind)
        for layer_type, kind in by_layer.items()
        if kind == "longrope" or "dynamic" in str(kind)
    ]


class _LengthOnly(DynamicCache):
    """Reports `length` tokens, but stores none."""

    length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def _drops_cache(model: Any, limit: int) -> bool:
    """Whether the model drops its cache when it prepares the first forward past `limit` tokens."""
    cache = _LengthOnly(config=model.config.get_text_config(decoder=True))
    cache.length = limit
    ids = torch.zeros(1, limit + 1, dtype=torch.long, device=model.device)
    prepared = model.prepare_inputs_for_generation(
        ids,
        **{compat.cache_name(model): cache},
        attention_mask=torch.ones_like(ids),
        next_sequence_length=1,
        is_first_iteration=False,
        use_cache=True,
    )
    return not any(prepared.get(name) is cache for name in compat.CACHE_NAMES)
