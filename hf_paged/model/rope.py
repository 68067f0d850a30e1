"""Rotary embeddings whose factors depend on the largest position in a forward (dynamic NTK,
LongRoPE)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from .. import compat
from ..interrupts import restoring
from .writes import restore_attributes


class LengthRope:
    """Gives each token of a packed forward the rotary factors with which plain `generate` computes
    it. A prompt token gets the factors for the prompt's length; a later token, those for the length
    of the sequence up to and including that token. But if plain `generate` recomputes all tokens
    when the factors change (`must_recompute`), all tokens get the factors for the sequence's
    current length. The id of factors is the shortest length that uses them, or 0 for the factors of
    short sequences."""

    def __init__(
        self, model: PreTrainedModel, module_types: dict[nn.Module, list[tuple[str, int]]]
    ) -> None:
        """`module_types`: for each rotary embedding, its types, as pairs of the type's name and the
        length in tokens up to which this type uses the factors of short sequences."""
        self._modules = list(module_types)
        limits = {type_and_limit for types in module_types.values() for type_and_limit in types}
        # beyond these limits, each length has its own factors
        self._dynamic_limits = sorted(limit for name, limit in limits if name != "longrope")
        self._limits = sorted((limit for _, limit in limits), reverse=True)
        self.must_recompute = any(_drops_cache(model, limit) for limit in self._limits)
        """Whether plain `generate` recomputes all tokens when a sequence's factors change."""

    def factors_id(self, length: int) -> int:
        """Returns the id of the factors of a forward whose longest sequence has `length` tokens."""
        if self._dynamic_limits and length > self._dynamic_limits[0]:
            return length
        return next((limit + 1 for limit in self._limits if length > limit), 0)

    def token_factors(
        self, first: int, end: int, num_prompt_tokens: int, num_tokens: int
    ) -> list[int]:
        """Returns the ids of the factors of tokens `[first, end)` of a sequence that has
        `num_tokens` tokens, including its prompt of `num_prompt_tokens`."""
        if self.must_recompute:
            return [self.factors_id(num_tokens)] * (end - first)
        return [
            self.factors_id(max(num_prompt_tokens, position + 1)) for position in range(first, end)
        ]

    @property
    def has_short_factors(self) -> bool:
        """Whether the modules hold the factors of short sequences."""
        return not any(
            name.endswith("max_seq_len_cached") and int(value) > module.original_max_seq_len
            for module in self._modules
            for name, value in vars(module).items()
        )

    @restoring
    def rotating(self, factors_ids: list[int]) -> Iterator[None]:
        """A context for a packed forward. `factors_ids`: the id of each token's factors; if it is
        empty, the modules use the factors that they hold. The forward writes to copies of the
        modules' buffers, and the modules are restored when the context ends."""
        token_indices: dict[int, list[int]] = {}
        for index, factors_id in enumerate(factors_ids):
            token_indices.setdefault(factors_id, []).append(index)
        rotate = functools.partial(_rotate, token_indices)
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                for attributes in (vars(module), module._buffers):
                    stack.callback(restore_attributes, attributes, dict(attributes))
                module._buffers.update(
                    {name: x if x is None else x.clone() for name, x in module._buffers.items()}
                )
                if token_indices:
                    stack.callback(module.register_forward_hook(rotate, with_kwargs=True).remove)
            yield


def _rotate(
    token_indices: dict[int, list[int]],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    """A forward hook: for each id of factors, calls the module on the tokens with this id and on
    one more position, which makes the module compute the factors of this id. `token_indices`: the
    indices of the tokens, by id."""
    kwargs = dict(kwargs)
    x, positions, *other_args = (
        *args,
        *(kwargs.pop(name) for name in ("x", "position_ids") if name in kwargs),
    )
    outputs = []
    order: list[int] = []
    for factors_id in sorted(token_indices):
        # resets the module to the factors of a short sequence
        module.forward(x, torch.zeros_like(positions[..., :1]), *other_args, **kwargs)
        indices = token_indices[factors_id]
        selected_positions = positions[..., torch.tensor(indices, device=positions.device)]
        last_position = torch.full_like(selected_positions[..., :1], max(factors_id - 1, 0))
        extended_positions = torch.cat([selected_positions, last_position], dim=-1)
        outputs.append(module.forward(x, extended_positions, *other_args, **kwargs))
        order += indices
    inverse_order = torch.tensor(order, device=positions.device).argsort()

    def join(*tables: Tensor) -> Tensor:
        return torch.cat([table[..., :-1, :] for table in tables], dim=-2)[..., inverse_order, :]

    return tree_map(join, *outputs)


def find_length_rope(model: PreTrainedModel, modules: Iterable[nn.Module]) -> LengthRope | None:
    """Makes the [`LengthRope`] of a model; `None` if its factors are the same for all lengths.
    Errors of the model's `prepare_inputs_for_generation` pass through."""
    module_types: dict[nn.Module, list[tuple[str, int]]] = {}
    for module in modules:
        for layer_type, kind in length_types(module):
            if kind == "longrope":
                parameters: Any = module.config.rope_parameters
                if layer_type is not None:
                    parameters = parameters[layer_type]
                limit = parameters["original_max_position_embeddings"]
            else:
                limit = module.original_max_seq_len
            module_types.setdefault(module, []).append((kind, int(limit)))
    return LengthRope(model, module_types) if module_types else None


def length_types(module: nn.Module) -> list[tuple[str | None, str]]:
    """The types of a rotary embedding whose factors depend on the length, each as a pair: the type
    of the layers that use it (`None`: all layers), and its name. Empty for other modules."""
    types: Any = compat.attribute(module, "rope_type")
    if not types:  # most modules
        return []
    by_layer = types if isinstance(types, dict) else {None: types}
    return [
        (layer_type, kind)
        for layer_type, kind in by_layer.items()
        if kind == "longrope" or "dynamic" in str(kind)
    ]


class _LengthOnlyCache(DynamicCache):
    """A cache that reports `length` tokens, but holds none."""

    def __init__(self, config: PreTrainedConfig, length: int) -> None:
        super().__init__(config=config)
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def _drops_cache(model: Any, limit: int) -> bool:
    """Whether the model's `prepare_inputs_for_generation` drops the cache for the first forward
    beyond `limit` tokens."""
    cache = _LengthOnlyCache(model.config.get_text_config(decoder=True), limit)
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
