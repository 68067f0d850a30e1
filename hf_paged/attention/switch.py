"""Finds the attention implementation that a model's own code uses, and switches models to ours for
the duration of a call."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import compat, forks
from ..compiled import is_compiled, is_switched
from ..interrupts import is_interrupt
from ..rooms import LatentRoom, room_if_installed
from ..switches import Switches, Switching
from ..topics import Topic

NAME = "hf_paged"


class _SwitchedName(str):
    """Our name in a switched config. It also compares equal to the config's original name, and
    pickles as that name."""

    original: str

    def __new__(cls, original: str) -> _SwitchedName:
        self = super().__new__(cls, NAME)
        self.original = original
        return self

    def __eq__(self, other: object) -> bool:
        is_ours = str.__eq__(self, other) is True
        return is_ours or self.original == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return str, (self.original,)


# returns the same object for the same name, since checks for changes of a model compare the
# attributes of its config by identity
_switched_name = functools.cache(_SwitchedName)


_register: Callable[[], None] | None = None
"""Registers our functions with transformers again, for calls that began before hf_paged was
uninstalled; `None` while it is installed."""


def _switching(config: PreTrainedConfig) -> Switching:
    """Returns the functions that switch a config to our attention, and restore it."""
    implementation = compat.attention_of(config)
    # a shallow copy made during a call is already switched
    original = getattr(implementation, "original", implementation)

    def switch() -> None:
        if _register is not None:
            _register()
        compat.set_attention(config, _switched_name(original))

    return switch, functools.partial(compat.set_attention, config, original)


def _unregister_unused() -> None:
    """Makes transformers forget our functions if hf_paged has been uninstalled."""
    if _register is not None:
        compat.forget_attention(NAME)


_switches: Switches[PreTrainedConfig] = Switches(_switching, _unregister_unused)


def unregister_when_unused(register: Callable[[], None] | None) -> None:
    """Makes transformers forget our functions once no call in progress uses them. A call that
    switches to them again first calls `register`. With `None`, undoes this: our functions stay
    registered."""
    global _register
    _register = register
    if not _switches.entries:
        _unregister_unused()


def switch_attention(modules: list[nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which attention layers that read the `switchable_configs` of a model's
    `modules` call our attention function. If the optional module `latent` is installed, MLA layers
    pass latents to our function instead of expanded keys and values."""
    latent: LatentRoom | None = room_if_installed("latent")
    if latent is not None and have_latents(modules):
        latent.wrap_expansions(modules)
    return _switches.switched(switchable_configs(modules))


def have_latents(modules: Iterable[nn.Module]) -> bool:
    """Whether classes of `modules` expand keys and values from latents (MLA)."""
    return any("expand_kv" in vars(type(module)) for module in modules)


def compiled_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the compiled modules that may update a cache. Dynamo cannot trace the update, and
    would compile the code around it in many pieces."""
    return [
        module
        for module in modules
        if (is_compiled(module) or is_switched(module))
        and any(map(_updates_cache, map(type, module.modules())))
    ]


def model_attention(config: PreTrainedConfig | None, cls: type | None = None) -> str:
    """Returns the name of the config's own attention implementation, even while a call has switched
    the config: `"sdpa"` without a config, `"eager"` if the config names none. For a model that was
    loaded with `attn_implementation="hf_paged"`, returns `"sdpa"` if a model in the file that
    defines the layer class `cls` supports sdpa, if that file has no models, or without a `cls`;
    otherwise `"eager"`."""
    if config is None:
        return "sdpa"
    implementation = config._attn_implementation or "eager"
    if isinstance(implementation, _SwitchedName):
        return implementation.original
    if implementation != NAME:
        return implementation
    if cls is None or _file_supports_sdpa(cls.__module__):
        return "sdpa"
    return "eager"


@functools.cache
def _file_supports_sdpa(module_name: str) -> bool:
    classes = filter(inspect.isclass, vars(sys.modules[module_name]).values())
    supports = [
        getattr(cls, compat.SUPPORTS_SDPA)
        for cls in classes
        if issubclass(cls, PreTrainedModel) and cls.__module__ == module_name
    ]
    return not supports or any(supports)


def _file_global(cls: type, name: str) -> Any:
    """Returns the global `name` of the file that defines the class or, failing that, of a base
    class's file; `None` if there is none."""
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        value = getattr(module, name, None)
        if value is not None:
            return value
    return None


def model_attention_function(cls: type, implementation: str) -> Callable[..., Any]:
    """Returns the function that an attention layer of class `cls` would call with that
    implementation. Raises `KeyError` if the name is unknown."""
    # a file may define its own interface, with other functions than transformers' interface
    interface = _file_global(cls, "ALL_ATTENTION_FUNCTIONS") or ALL_ATTENTION_FUNCTIONS
    eager = _file_global(cls, "eager_attention_forward")
    return interface.get_interface(implementation, eager)


STOCK_MASKS = {
    masking_utils.sdpa_mask,
    masking_utils.eager_mask,
    masking_utils.flash_attention_mask,
    masking_utils.flex_attention_mask,
}
# functions whose results our kernels reproduce; `eager_features` decides this for eager functions
STOCK_FUNCTIONS = (
    sdpa_attention_forward,
    flash_attention_forward,
    flex_attention_forward,
)


def stock_function(cls: type, implementation: str) -> Callable[..., Any] | None:
    """Returns the `model_attention_function` if that and the implementation's mask function are
    transformers' own code; `None` if other code registered or replaced one of them, or if one is
    missing."""
    if compat.mask_function(implementation) not in STOCK_MASKS:
        return None
    try:
        function = model_attention_function(cls, implementation)
    except KeyError:  # an unknown name, for which the model's own forward will raise
        return None
    if function in STOCK_FUNCTIONS:
        return function
    is_eager = function is not None and function is _file_global(cls, "eager_attention_forward")
    if is_eager and is_from_transformers(function):
        return function
    return None


@functools.cache
def is_from_transformers(function: Any) -> bool:
    """Whether the function's code is in the transformers file that its `__module__` names; false
    for a wrapper from elsewhere."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    code = getattr(function, "__code__", None)
    return (
        function.__module__.startswith("transformers.")
        and code is not None
        and code.co_filename == file
    )


def _attention_configs(
    modules: Iterable[nn.Module],
) -> dict[tuple[int, type], PreTrainedConfig]:
    """Returns the configs of the attention layers in `modules` that update a cache, by the config's
    `id` and the layer's class."""
    configs = {}
    for module in modules:
        cls: type = type(module)
        config = compat.attribute(module, "config")
        if isinstance(config, PreTrainedConfig) and _calls_interface(cls):
            configs[id(config), cls] = config
    return configs


def foreign_attention(modules: Iterable[nn.Module]) -> str | None:
    """Returns why attention layers in `modules` that update a cache get gathered keys and values;
    `None` if all of them use transformers' attention functions."""
    for (_, cls), config in _attention_configs(modules).items():
        implementation = model_attention(config, cls)
        if stock_function(cls, implementation) is None:
            return Topic.MODEL_CODE(
                f"its attention function or mask, {implementation!r}, is not transformers' own"
            )
    return None


def calls_interface(modules: Iterable[nn.Module]) -> bool:
    """Whether a layer in `modules` updates a cache and calls the attention interface."""
    return any(map(_calls_interface, map(type, modules)))


def switchable_configs(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Returns the configs from which attention layers that update a cache read their
    implementation, except if the model was loaded with `attn_implementation="hf_paged"`. `modules`:
    all modules of a model."""
    switchable = {}
    for (config_id, _), config in _attention_configs(modules).items():
        name = compat.attention_of(config)  # read once, since another thread's call may restore it
        if name != NAME or isinstance(name, _SwitchedName):
            switchable[config_id] = config
    return list(switchable.values())


# Reading the models' source code

_parsing = forks.lock()


@functools.cache
def _tree(code: Any) -> ast.Module | None:
    """Returns the syntax tree of a class or a function, if its source is available."""
    with _parsing:  # CPython 3.11 counts the parser's recursion depth over all threads
        try:
            return ast.parse(textwrap.dedent(inspect.getsource(code)))
        except (OSError, TypeError, SyntaxError) as error:
            if is_interrupt(error):
                raise
            return None


@functools.cache
def _calls_interface(cls: type) -> bool:
    """Whether the code of the class, without its bases, updates a cache and calls the attention
    interface; false for whole models, and if the source is not available."""
    tree = _tree(cls)
    if tree is None or issubclass(cls, PreTrainedModel):
        return False
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return "ALL_ATTENTION_FUNCTIONS" in names and "update" in _attributes(tree)


@functools.cache
def _updates_cache(cls: type) -> bool:
    """Whether the code of the class or of its bases may update a cache; false for whole models, and
    true if the source is not available."""
    if issubclass(cls, PreTrainedModel):  # only a model's layers update caches
        return False
    for base in cls.__mro__:
        package, _, _ = base.__module__.partition(".")
        if package in ("builtins", "torch"):
            continue
        tree = _tree(base)
        if tree is None or any(name.startswith("update") for name in _attributes(tree)):
            return True
    return False


def _attributes(tree: ast.Module) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


# The attributes, parameters and calls of eager attention functions whose results our kernels
# reproduce.
_PLAIN_ATTRIBUTES = {"num_key_value_groups", "training", "head_dim", "sinks"}
_PLAIN_PARAMETERS = {
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
    "scaling",
    "dropout",
    "kwargs",
}
_OPTIONAL_PARAMETERS = {"softcap", "position_bias"}
_PLAIN_CALLS = set(
    "matmul repeat_kv softmax dropout transpose contiguous to type size float tanh reshape expand"
    " cat max getattr hasattr maybe_autocast".split()
)


@functools.cache
def eager_features(function: Callable[..., Any] | None) -> frozenset[str] | None:
    """Returns the features that an eager attention function, according to its source, adds to
    softmax(q k * scale + mask) v: any of `softcap`, `position_bias` and `sinks`. Returns `None` if
    the function may compute anything else, so that our kernels cannot replace it."""
    tree = _tree(function)
    if function is None or tree is None:
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    parameters = set(inspect.signature(function).parameters)
    attributes = set()
    calls = set()
    names = set()
    nodes = itertools.chain.from_iterable(map(ast.walk, definition.body))
    for node in nodes:
        match node:
            case ast.Attribute(ast.Name("module"), attribute):
                attributes.add(attribute)
            case ast.Call(ast.Attribute(attr=name) | ast.Name(name)):
                calls.add(name)
            case ast.Call():
                calls.add("?")
            case ast.Name(name):
                names.add(name)
    is_plain = parameters <= _PLAIN_PARAMETERS | _OPTIONAL_PARAMETERS
    is_plain = is_plain and attributes <= _PLAIN_ATTRIBUTES and calls <= _PLAIN_CALLS
    if not is_plain or "attention_mask" not in names:
        return None
    return frozenset(parameters & _OPTIONAL_PARAMETERS | attributes & {"sinks"})
