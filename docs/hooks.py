"""MkDocs hooks: put the package's version at the foot of pages, and add pages and pictures from
other folders of the checkout to the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "hf_paged/README.md": "map.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "ROADMAP.md": "roadmap.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks-method.md",
}
RESULTS = "benchmarks/results"
EXTERNAL_FILES = {
    **PAGES,
    **{
        path.relative_to(ROOT).as_posix(): f"results/{path.name}"
        for path in (ROOT / RESULTS).iterdir()
    },
}
"""Paths in the site by path in the checkout."""

_LINK = re.compile(r"(\]\()([^)#\s:]+)")


def on_config(config: Any) -> Any:
    """Puts the version at the foot of each page."""
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "([^"]+)"', project, re.MULTILINE)
    assert version is not None
    config.copyright = f"hf_paged {version[1]}, Apache License 2.0"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the files of `EXTERNAL_FILES`."""
    for path, uri in EXTERNAL_FILES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Converts links between files of the checkout to links of the site."""
    uri = page.file.src_uri
    sources = {site: checkout for checkout, site in EXTERNAL_FILES.items()}
    folder = posixpath.dirname(sources.get(uri, f"docs/{uri}"))

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        site = EXTERNAL_FILES.get(
            target, target.removeprefix("docs/") if target.startswith("docs/") else None
        )
        return (
            match[0]
            if site is None
            else match[1] + posixpath.relpath(site, posixpath.dirname(uri) or ".")
        )

    return _LINK.sub(replace, markdown)
