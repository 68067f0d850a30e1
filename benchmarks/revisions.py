"""Whether the files of `benchmarks.all` are one run, and of the code as it stands."""

from __future__ import annotations

import ast

from benchmarks import machine, report
from benchmarks.all import NAME, STAGES

_ROOMS = ("attention", "batching", "cache", "kernels", "rectangles", "tape")
COMPUTES = tuple(f"hf_paged/{name}" for name in _ROOMS)
"""Folders whose changes make figures old."""
OF_ONE = {"revision": ("revision",), "machine": ("cpu", "cores", "threads")}
"""Facts that all files have in common."""
NO_COMMIT = "not committed, a shallow clone, or no git"


def mixed() -> list[str]:
    """Why the list of stages and the files of the stages are not one run."""
    if not report.exists(NAME):
        return []
    reasons = [
        f"{NAME}.json lists the stage {entry['name']} as complete; {entry['file']}.json is missing"
        for entry in report.result(NAME)["stages"]
        if not (entry["reason"] or report.exists(entry["file"]))
    ]
    for what, keys in OF_ONE.items():
        if len(names := files_by(*keys)) > 1:
            parts = [f"{', '.join(files)} of {what} {', '.join(of)}" for of, files in names.items()]
            reasons.append(f"files of benchmarks.all are of several {what}s: {'; '.join(parts)}")
    quick = [name for name in files() if "--quick" in report.result(name).get("command", "")]
    return reasons + [f"{name}.json is of a quick run, which says nothing" for name in quick]


def files() -> list[str]:
    """The names of the list's file and the stages' files; the list's comes first."""
    return [NAME, *(stage.file for stage in STAGES if report.exists(stage.file))]


def files_by(*keys: str) -> dict[tuple[str, ...], list[str]]:
    """The files by these facts."""
    names_by_values: dict[tuple[str, ...], list[str]] = {}
    for name in files():
        facts = report.result(name)["facts"]
        values = tuple(str(facts.get(key, f"{key} not recorded")) for key in keys)
        names_by_values.setdefault(values, []).append(f"{name}.json")
    return names_by_values


def stale() -> list[str]:
    """Why the figures of `benchmarks.all` cannot be released."""
    if not report.exists(NAME):
        return ["there is no run of benchmarks.all"]
    reasons, entries = mixed(), {entry["name"]: entry for entry in report.result(NAME)["stages"]}
    for stage in STAGES:
        if stage.name not in entries:
            reasons.append(f"{NAME}.json has no stage {stage.name}")
        elif reason := entries[stage.name]["reason"]:
            reasons.append(f"stage {stage.name}: {reason}")
    for (revision, tree), names in files_by("revision", "tree").items():
        said = f"{', '.join(names)} of revision {revision}"
        if tree != report.CLEAN or revision.endswith("+"):
            reasons.append(f"{said}: not of a clean work tree ({tree})")
        changed = changed_files(revision.removesuffix("+"))
        if changed is None:
            reasons.append(f"{said}: git has no such commit here ({NO_COMMIT})")
        elif changed:
            reasons.append(f"{said}: changed since: {', '.join(changed)}")
    return reasons


def changed_files(revision: str) -> list[str] | None:
    """Files in `COMPUTES` whose code in the work tree is not that of a revision; `None` without
    that revision."""
    names = machine.git("diff", "--name-only", revision, "--", *COMPUTES)
    if names is None:
        return None
    new = machine.git("ls-files", "--others", "--exclude-standard", "--", *COMPUTES) or ""
    return [
        name
        for name in [*names.splitlines(), *new.splitlines()]
        if code_of(name, machine.git("show", f"{revision}:{name}")) != code_of(name, present(name))
    ]


def present(name: str) -> str | None:
    """The text of a file in the work tree, without space at its ends, as git's output; `None`
    without it."""
    path = machine.checkout() / name
    return path.read_text(errors="replace").strip() if path.is_file() else None


def code_of(name: str, text: str | None) -> str | None:
    """The text of a file, of Python without comments and docstrings."""
    if text is None or not name.endswith(".py"):
        return text
    try:
        return ast.dump(_WithoutStrings().visit(ast.parse(text)))
    except SyntaxError:
        return text


class _WithoutStrings(ast.NodeTransformer):
    """Removes strings that are statements."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_string else node
