"""What mkdocs calls while it builds the site: pages from docstrings, links out of docs/, formulas without scripts."""

import posixpath
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from website import api, commands, components, maths, notebooks, repository  # noqa: E402

WORKER = "https://unpkg.com/iframe-worker/shim"
"""What the theme would load from outside."""
KINDS = ("defences", "attacks", "metrics", "models", "datasets", "partitions", "generators")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every component in the navigation."""
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for kind, path, _ in components.pages():
        found[kind].append(path if path.endswith("index.md") else {Path(path).stem: path})
    for section in config.nav or []:
        if "Components" in section:
            section["Components"] = [{kind.capitalize(): paths} for kind, paths in found.items()]
        if "Results" in section:  # a new page needs no line in mkdocs.yml
            known = str(config.nav)
            pages = [path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
            section["Results"] += [page for page in pages if f"'{page}'" not in known]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made: components, commands, the Python reference, notebooks, files of the repository."""
    made = {path: text for _, path, text in components.pages()}
    made["reference/commands.md"] = commands.page()
    made["reference/python.md"] = api.page()
    made |= notebooks.pages()
    linked: set[str] = set()
    for name, path in repository.TOP.items():
        made[path], some = repository.moved((ROOT / name).read_text(), name, path)
        linked |= some
    for file in files.documentation_pages():
        linked |= repository.moved(file.content_string, f"docs/{file.src_uri}", file.src_uri)[1]
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for name in ("style.css", "iframe-worker.js"):
        files.append(File.generated(config, name, content=(ROOT / "website" / name).read_text()))
    for name in sorted(linked):
        files.append(File.generated(config, f"files/{name}", content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:  # noqa: ANN401 - what mkdocs passes
    """Fit the links of the pages in docs/ to the site."""
    if page.file.generated_by:
        return markdown
    return repository.moved(markdown, posixpath.join("docs", page.file.src_uri), page.file.src_uri)[0]


def on_post_page(output: str, page: Page, **_: Any) -> str:  # noqa: ANN401 - what mkdocs passes
    """Draw formulas, also those of the Python reference, and load the search's worker from the site itself."""
    return maths.mathml(_own_worker(output, "../" * page.url.count("/")))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:  # noqa: ANN401 - what mkdocs passes
    """Do the same for the page that a server shows for a wrong address."""
    return _own_worker(output_content, "") if template_name.endswith(".html") else output_content


def _own_worker(page: str, up: str) -> str:
    return page.replace(WORKER, f"{up}iframe-worker.js")
