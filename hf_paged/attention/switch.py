"""Which attention implementation a model's own code would use, and switching it to ours for the duration of a call."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import compat, forks

NAME = "hf_paged"


class _Switched(str):
    """
    Our name in a config that a call has switched. A copy or pickle of the config, or of a model with it, made meanwhile
    gets what the config names by itself: the end of the call puts back this config alone.
    """

    named: str

    def __new__(cls, named: str) -> _Switched:
        name = super().__new__(cls, NAME)
        name.named = named
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.named

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return str, (self.named,)


class _Switches:
    """
    Configs that calls have switched to ours, with the implementation each had before.

    Calls overlap in threads, so each config knows the threads of its calls: the first saves, the last restores.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._held: dict[int, tuple[PreTrainedConfig, str, list[int]]] = {}
        forks.in_child(self)

    def enter(self, config: PreTrainedConfig) -> None:
        with self._lock:
            known = self._held.get(id(config)) or (config, compat.attention_of(config), [])
            self._held[id(config)] = known
            known[2].append(threading.get_ident())
            compat.set_attention(config, _Switched(known[1]))

    def leave(self, config: PreTrainedConfig) -> None:
        with self._lock:
            _, named, threads = self._held[id(config)]
            threads.remove(threading.get_ident())
            if not threads:  # in this order, since `named` reads without the lock
                compat.set_attention(config, named)
                del self._held[id(config)]

    def after_fork(self, freed: set[Any]) -> None:
        """The calls of other threads do not go on in a child process."""
        for key, (config, named, threads) in list(self._held.items()):
            threads[:] = [thread for thread in threads if thread == threading.get_ident()]
            if not threads:
                compat.set_attention(config, named)
                del self._held[key]

    def named(self, config: PreTrainedConfig) -> str | None:
        held = self._held.get(id(config))
        return held[1] if held is not None else None


_switches = _Switches()


def model_attention(config: PreTrainedConfig | None, module: nn.Module | None = None) -> str:
    """
    The implementation that `config` names, or that it named before a call switched it. A model that was loaded with
    ours has none of its own: then sdpa if the model's file says that it serves it, else eager.
    """
    if config is None:
        return "sdpa"
    named = _switches.named(config) or config._attn_implementation or "eager"
    if isinstance(named, _Switched):  # a shallow copy of a config that a call has switched
        named = named.named
    if named != NAME:
        return named
    return "sdpa" if module is None or _file_supports_sdpa(type(module).__module__) else "eager"


@functools.cache
def _file_supports_sdpa(module_name: str) -> bool:
    classes: list[Any] = [
        value
        for value in vars(sys.modules[module_name]).values()
        if inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == module_name
    ]
    return any(map(compat.supports_sdpa, classes)) or not classes


def _of_file(cls: type, name: str) -> Any:
    """What the file that defines a class calls `name`, else that of a base class; `None` if there is none."""
    for base in cls.__mro__:
        found = getattr(sys.modules.get(base.__module__), name, None)
        if found is not None:
            return found
    return None


def model_attention_function(cls: type, implementation: str) -> Callable[..., Any]:
    """What an attention layer of class `cls` would have called with that implementation."""
    # a file may have an interface of its own, with functions that no other file sees
    interface = _of_file(cls, "ALL_ATTENTION_FUNCTIONS") or ALL_ATTENTION_FUNCTIONS
    found: Callable[..., Any] = interface.get_interface(implementation, _of_file(cls, "eager_attention_forward"))
    return found


def stock_function(cls: type, implementation: str) -> Callable[..., Any] | None:
    """
    `model_attention_function` where that is transformers' own, with a mask that is, so that its maths are known; `None`
    for a function that others registered, or put in the place of one of theirs.
    """
    if not makes_stock_masks(implementation):
        return None
    try:
        function = model_attention_function(cls, implementation)
    except KeyError:  # plain raises this, too
        return None
    if function in STOCK_FUNCTIONS:
        return function
    is_eager = function is not None and function is _of_file(cls, "eager_attention_forward")
    return function if is_eager and _is_from_transformers(function) else None


# what our kernels compute the same as
STOCK_FUNCTIONS = (sdpa_attention_forward, flash_attention_forward, flex_attention_forward)
_STOCK_MASKS = (sdpa_mask, eager_mask, flash_attention_mask, flex_attention_mask)


def model_mask_function(implementation: str) -> Callable[..., Any] | None:
    """What makes the masks of that implementation; `None` if it gets no masks."""
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation] if compat.makes_masks(implementation) else None


def makes_stock_masks(implementation: str) -> bool:
    """Whether transformers' own functions make the masks of that implementation."""
    return model_mask_function(implementation) in _STOCK_MASKS


@functools.cache
def _is_from_transformers(function: Any) -> bool:
    """Whether the code is that of the file that the function says it comes from: a wrapper says the same."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    code = getattr(function, "__code__", None)
    return function.__module__.startswith("transformers.") and code is not None and code.co_filename == file


def foreign_attention(modules: Iterable[nn.Module]) -> str | None:
    """
    Why keys and values are gathered for cached attention layers among `modules`, if these would call a function, or get
    masks, that are not transformers' own.
    """
    seen = set()
    for module in modules:
        config = getattr(module, "config", None)
        cls: type = type(module)
        if not isinstance(config, PreTrainedConfig) or (cls, id(config)) in seen or not _calls_interface(cls):
            continue
        seen.add((cls, id(config)))
        implementation = model_attention(config, module)
        if stock_function(cls, implementation) is None:
            return f"its attention function or mask, {implementation!r}, is not transformers' own"
    return None


@contextlib.contextmanager
def use_paged_attention(model: PreTrainedModel) -> Iterator[None]:
    """
    Within it, the cached attention layers of `model` call our attention function. As what it is made of, it is to be
    entered and left within `interrupts.held`.
    """
    with use_configs(switchable_configs(model.modules())):
        yield


@contextlib.contextmanager
def use_configs(configs: Iterable[PreTrainedConfig]) -> Iterator[None]:
    """`use_paged_attention` for what `switchable_configs` returned."""
    entered: list[PreTrainedConfig] = []
    try:
        for config in configs:
            _switches.enter(config)
            entered.append(config)
        yield
    finally:
        for config in reversed(entered):
            _switches.leave(config)


def switchable_configs(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """
    The configs that attention layers with a cache, of all a model's `modules`, read their implementation from, and
    whose other readers behave the same under our name as under the one they have.
    """
    readers: dict[int, tuple[PreTrainedConfig, set[type]]] = {}
    for module in modules:
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            readers.setdefault(id(config), (config, set()))[1].add(type(module))
    switchable = []
    for config, classes in readers.values():
        named = model_attention(config)
        if compat.attention_of(config) == NAME and _switches.named(config) is None:
            continue  # loaded with ours: nothing to switch
        if any(_calls_interface(cls) for cls in classes) and not any(_branches(cls, named) for cls in classes):
            switchable.append(config)
    return switchable


_parsing = forks.lock()


def _parse(code: Any) -> ast.Module:
    """The syntax tree of a class or a function. One at a time: CPython 3.11 counts depth over all threads."""
    with _parsing:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))


@functools.cache
def _tree(cls: type) -> ast.AST | None:
    try:
        return _parse(cls)
    except (OSError, TypeError, SyntaxError):
        return None


@functools.cache
def _calls_interface(cls: type) -> bool:
    """Whether the class has a cache to update and calls the attention interface itself."""
    tree = _tree(cls)
    if tree is None or issubclass(cls, PreTrainedModel):
        return False
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    updates = any(isinstance(node, ast.Attribute) and node.attr == "update" for node in ast.walk(tree))
    return "ALL_ATTENTION_FUNCTIONS" in names and updates


@functools.cache
def _branches(cls: type, named: str) -> bool:
    """Whether code of the class compares the implementation's name in a way that ours would answer differently."""
    tree = _tree(cls)
    if tree is None:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = node.left, node.comparators[0]
            if isinstance(left, ast.Attribute) and left.attr == "_attn_implementation":
                if _compare(node.ops[0], named, right) != _compare(node.ops[0], NAME, right):
                    return True
    return False


def _compare(op: ast.cmpop, name: str, literal: ast.expr) -> Any:
    try:
        value = ast.literal_eval(literal)
    except ValueError:
        return None if name == NAME else True  # compared with something we cannot read: not safe
    if isinstance(op, (ast.Eq, ast.NotEq)):
        return (name == value) == isinstance(op, ast.Eq)
    return (name in value) == isinstance(op, ast.In)


# What an eager attention function may use of its module and call, for our kernels to compute the same.
_PLAIN_ATTRIBUTES = {"num_key_value_groups", "training", "head_dim", "sinks"}
_PLAIN_PARAMETERS = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}
_OPTIONAL_PARAMETERS = {"softcap", "position_bias"}
_PLAIN_CALLS = set(
    "matmul repeat_kv softmax dropout transpose contiguous to type size float tanh reshape expand cat max getattr "
    "hasattr maybe_autocast".split()
)


@functools.cache
def eager_features(function: Callable[..., Any] | None) -> frozenset[str] | None:
    """
    What an eager attention function does beyond softmax(q k / scale + mask) v: a subset of `softcap`, `position_bias`
    and `sinks`. `None` if it does anything else, so that only calling it gives its numbers.
    """
    if function is None:
        return None
    try:
        tree = _parse(function)
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    parameters = set(inspect.signature(function).parameters)
    attributes, calls, names = set(), set(), set()
    for statement in definition.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "module":
                attributes.add(node.attr)
            elif isinstance(node, ast.Call):
                calls.add(node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "?"))
            elif isinstance(node, ast.Name):
                names.add(node.id)
    plain = (
        parameters <= _PLAIN_PARAMETERS | _OPTIONAL_PARAMETERS
        and attributes <= _PLAIN_ATTRIBUTES
        and calls <= _PLAIN_CALLS
        and "attention_mask" in names
    )
    if not plain:
        return None
    return frozenset((parameters & _OPTIONAL_PARAMETERS) | (attributes & {"sinks"}))
