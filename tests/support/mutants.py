"""Mutants of the core: whether the tests that reach a line notice that it is wrong.

    python -m tests.support.mutants trace       # a run of the fast tests: which reach which line
    python -m tests.support.mutants run [--seed 0] [--count 60] [--tests 40] [--json FILE]

A mutant changes one comparison, operator, condition or number in a line that a test reaches, in a
copy of the checkout. It is killed if one of those tests (at most `--tests`, drawn) fails or runs
for more than `LIMIT` seconds; what survives is listed, to be read: it may be equivalent.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support import tools
from tests.support.house import PACKAGE, ROOT, room_of, sources

DATA = ROOT / ".coverage"
LIMIT = 300.0
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def changed(node: ast.AST) -> ast.AST | None:
    """A wrong version of an expression; `None` if none is made of it."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        new.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        new.value += 1
    elif isinstance(node, ast.IfExp):
        new.body, new.orelse = node.orelse, node.body
    else:
        return None
    return new


def sites(reached: dict[str, dict[int, list[str]]]) -> Iterator[tuple[Path, ast.expr]]:
    """Expressions of the core, of one line that tests reach, that can be changed."""
    for path in sources():
        lines = reached.get(str(path), {})
        if room_of(path) != "core" or not lines:
            continue
        tree = ast.parse(path.read_text())
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        in_texts = {
            part for node in texts for part in ast.walk(node)
        }  # have no columns of their own
        for node in ast.walk(tree):
            if node in in_texts:
                continue
            is_line = isinstance(node, ast.expr) and node.lineno == node.end_lineno
            if is_line and any(lines.get(node.lineno, ())) and changed(node) is not None:
                yield path, node


def replaced(path: Path, node: ast.expr) -> str:
    """The file's source with the wrong version of the expression."""
    lines = path.read_text().splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()  # columns count bytes
    new = ast.unparse(changed(node))  # type: ignore[arg-type]
    middle = f"({new})".encode()
    lines[node.lineno - 1] = (
        line[: node.col_offset] + middle + line[node.end_col_offset :]
    ).decode()
    return "".join(lines)


def outcome(path: Path, source: str, tests: Sequence[str]) -> str:
    """`killed` or `survived`, of tests with this source in a copy of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "site", "build"))
        (checkout / path.relative_to(ROOT)).write_text(source)
        command = [*tools.module("pytest", "-x", "-q", "-p", "no:cacheprovider"), *tests]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        try:
            done = subprocess.run(
                command, cwd=checkout, env=environment, capture_output=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return "killed"
        return "killed" if done.returncode == 1 else f"survived ({done.returncode})"


def trace() -> int:
    options = ("--cov", str(PACKAGE), "--cov-context", "test", "--cov-report", "")
    return subprocess.run(tools.module("pytest", "-q", "-n", "2", *options), cwd=ROOT).returncode


def run(seed: int, count: int, num_tests: int) -> list[dict[str, Any]]:
    from coverage import CoverageData

    data = CoverageData(str(DATA))
    data.read()
    reached = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
    draw, results = random.Random(seed), list[dict[str, Any]]()
    for path, node in draw.sample(list(sites(reached)), count):
        tests = sorted({name.split("|")[0] for name in reached[str(path)][node.lineno] if name})
        if len(tests) > num_tests:
            tests = draw.sample(tests, num_tests)
        found = outcome(path, replaced(path, node), tests)
        line = f"{path.relative_to(ROOT)}:{node.lineno}"
        before, after = ast.unparse(node), ast.unparse(changed(node))  # type: ignore[arg-type]
        results.append({"line": line, "before": before, "after": after, "outcome": found})
        print(f"{found:12} {line}: {before}  ->  {after}  ({len(tests)} tests)", flush=True)
    killed = sum(result["outcome"] == "killed" for result in results)
    print(f"{killed} of {count} killed")
    return results


def main() -> int:
    parser = tools.parser(
        __doc__,
        seed=0,
        count=(60, "number of mutants"),
        tests=(40, "most tests of a mutant"),
        json=(Path, "file of the results"),
    )
    parser.add_argument("command", choices=["trace", "run"])
    args = parser.parse_args()
    if args.command == "trace":
        return trace()
    results = run(args.seed, args.count, args.tests)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
