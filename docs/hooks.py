"""Pages and pictures of the site that are kept elsewhere in the checkout, where their readers look for them."""

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
    "benchmarks/README.md": "benchmarks-method.md",
}
RESULTS = "benchmarks/results"
KEPT = {**PAGES, **{path.relative_to(ROOT).as_posix(): f"results/{path.name}" for path in (ROOT / RESULTS).iterdir()}}
"""Place in the checkout to place in the site."""

_LINK = re.compile(r"(\]\()([^)#\s:]+)")


def on_files(files: Any, config: Any) -> Any:
    """Adds them."""
    for path, uri in KEPT.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they stand in the checkout become links of the site."""
    uri = page.file.src_uri
    sources = {site: checkout for checkout, site in KEPT.items()}
    folder = posixpath.dirname(sources.get(uri, f"docs/{uri}"))

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        site = KEPT.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        return match[0] if site is None else match[1] + posixpath.relpath(site, posixpath.dirname(uri) or ".")

    return _LINK.sub(replace, markdown)
