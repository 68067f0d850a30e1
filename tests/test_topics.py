"""Every warning and every reason of a route points to a row of docs/guide/troubleshooting.md, and
every row is used."""

from __future__ import annotations

import ast
import functools
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_paged
from hf_paged.topics import Topic, TopicError
from tests.support.rooms import needs_all_rooms

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guide" / "troubleshooting.md"
LOGGED = {"warning", "error", "exception", "log", "warn_once", "log_once"}
REASONS = re.compile(
    r"_?reasons?_|_?reasons$|(?!finish).*_(reason|check)$|foreign_attention$|_difference$"
)
"""Functions that return or yield reasons: why a route, a layout or a draft is ruled out."""
WRAPPED = (
    "unsupported_reason _prefill_unsupported_reason _reason wrapper_reason unmixable_reason"
    " _unswitchable_reason reason_against_replays reason_against_adapters"
).split()
"""Those whose reasons become parts of another message or error, which points to its topic."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Our modules' code, by path."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for path in (ROOT / "hf_paged").rglob("*.py")
    }


def is_topic(node: ast.AST) -> bool:
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_attribute and node.value.id == "Topic"


def names_topic(node: ast.AST) -> bool:
    """Whether the code mentions a topic."""
    return any(map(is_topic, ast.walk(node)))


def assigned(function: ast.AST, name: str) -> list[ast.AST]:
    assigns = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return [x.value for x in assigns if name in [getattr(target, "id", "") for target in x.targets]]


def log_calls(tree: ast.Module) -> Iterator[tuple[ast.Call, ast.AST]]:
    """Calls of a logger or of our functions that log, each with the code around it."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for scope in [*functions, *(x for x in tree.body if isinstance(x, (ast.Expr, ast.If)))]:
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and node.args:
                owner, _, name = ast.unparse(node.func).rpartition(".")
                if name in LOGGED and owner in ("", "logger"):
                    yield node, scope


def test_the_page_has_a_row_for_each_topic_and_error_class() -> None:
    anchors = re.findall(r'^\| <a id="([\w-]+)"></a>([\w-]+) \|', PAGE.read_text(), re.MULTILINE)
    assert anchors == [(value, value) for value in sorted(topic.value for topic in Topic)]
    for name, value in vars(hf_paged).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, TopicError) and f"`{name}`" in PAGE.read_text()


@needs_all_rooms
def test_every_topic_is_used() -> None:
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    used = {node.attr for node in nodes if is_topic(node)}
    assert used == set(Topic.__members__)


@pytest.mark.slow
def test_warnings_point_to_a_topic() -> None:
    missing = []
    for path, tree in trees().items():
        if path == "hf_paged/model/registry.py":  # `warn_once` itself, and reasons that have topics
            continue
        for call, scope in log_calls(tree):
            names = [x.id for x in call.args if isinstance(x, ast.Name)]
            messages = [value for name in names for value in assigned(scope, name)]
            if not any(map(names_topic, [*call.args, *messages])):
                missing.append(f"{path}:{call.lineno}")
    assert not missing


def test_reasons_point_to_a_topic() -> None:
    missing = []
    for path, tree in trees().items():
        for function in ast.walk(tree):
            name = function.name if isinstance(function, ast.FunctionDef) else ""
            if REASONS.match(name) and name not in WRAPPED:
                bare = filter(is_bare_text, ast.walk(function))
                missing += [f"{path}:{node.lineno}" for node in bare]
    assert not missing


def is_bare_text(node: ast.AST) -> bool:
    """Whether the code returns or yields text that names no topic and holds no other reason."""
    if not isinstance(node, (ast.Return, ast.Yield)) or node.value is None:
        return False
    values = [node.value]
    if isinstance(node.value, ast.IfExp):
        values = [node.value.body, node.value.orelse]
    elif isinstance(node.value, ast.BoolOp):
        values = node.value.values
    parts = (part for x in values if isinstance(x, ast.JoinedStr) for part in ast.walk(x))
    if any(isinstance(part, ast.Name) and part.id in ("reason", "why") for part in parts):
        return False
    texts = [x for x in values if isinstance(x, ast.Constant) and type(x.value) is str]
    return bool(texts) or any(isinstance(x, ast.JoinedStr) for x in values)


def test_messages_end_with_one_pointer_that_survives_a_copy() -> None:
    error = hf_paged.OutOfBlocksError("needs 3 blocks")
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error) == "needs 3 blocks [troubleshooting.md#out-of-blocks]"
    assert Topic.HOOKS(Topic.HOOKS("a hook")) == "a hook [troubleshooting.md#hooks]"
    inner = Topic.GATHERED(f"gathered ({Topic.HOOKS('a hook')})")
    assert inner == "gathered (a hook [troubleshooting.md#hooks])"
