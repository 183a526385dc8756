"""Settings of the docs site: ``./run docs`` builds and serves it.

The pages are the Markdown files of the repository, where they lie: a link between them works on
GitHub and on the site. The theme is furo: it has light and dark, search and small screens, loads
nothing from other hosts, and is a tenth of the size of pydata's theme. The reference has a page for
each module that ``docs/api.md`` lists, made from the module's ``__all__`` and its docstrings.
"""

import inspect
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

import tilewise

ROOT = Path(__file__).resolve().parents[1]

# The modules of the reference, by the names that users write: tilewise.masks.causal().
MODULES = re.findall(r"^   (tile[\w.]+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
for _name in ("masks", "patterns", "scores"):
    sys.modules[f"tilewise.{_name}"] = getattr(tilewise, _name)

project = "tilewise"
version = release = tilewise.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]

# ---- pages: the source folder is the repository
root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/*/suites/*.md",
    "benchmarks/README.md",
    "benchmarks/studies/*/report.md",
    "docs/*.md",
    "docs/api/*.rst",  # autosummary writes them
    "examples/README.md",
    "notes/[!R]*.md",
]
exclude_patterns = [".*", "build", "csrc", "dist", "lab", "src", "studies", "tests"]
templates_path = [str(ROOT / "docs/_templates")]
myst_heading_anchors = 4
highlight_language = "none"  # of indented blocks: commands and formulas

# ---- the reference
autosummary_context = {"pages": MODULES}
autosummary_ignore_module_all = False
# Their classes are extended: by tilelab.huggingface and by tilewise.integrations.vllm.
autodoc_mock_imports = ["transformers", "vllm"]
autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

# ---- what it looks like
html_theme = "furo"
html_title = "tilewise"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False  # the license is in the repository
html_domain_indices = False  # the reference lists its modules
pygments_dark_style = "github-dark"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0a7a8f", "color-brand-content": "#0a7a8f"},
    "dark_css_variables": {"color-brand-primary": "#4fc0d4", "color-brand-content": "#4fc0d4"},
}

# Pages that GitHub shows as they are, and the pages below them in the site's navigation.
BELOW = {
    "benchmarks/README": "*/suites/*",
    "docs/findings": "../benchmarks/studies/*/report",
}


def complete(app: Sphinx, page: str, text: list[str]) -> None:
    """Give a page what only the site needs: the start page is the README and the navigation."""
    if page == root_doc:
        readme = ROOT / "README.md"
        app.env.note_dependency(str(readme))
        text[0] = re.sub(r"\]\((?!https?:|#)", "](../", readme.read_text()) + "\n" + text[0]
    elif page in BELOW:
        text[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{BELOW[page]}\n```\n"


def lead_to_the_start_page(app: Sphinx, error: Exception | None) -> None:
    """The folder that is served opens with the start page."""
    if error is None:
        start = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(start)


def says_nothing(app: Sphinx, kind: str, name: str, of: object, skip: bool, _: object) -> bool:
    """Leave out what Python says of a NamedTuple's fields: its docstring has their meaning."""
    return skip or str(getattr(of, "__doc__", "")).startswith("Alias for field number")


def in_the_readers_words(
    app: Sphinx, kind: str, name: str, of: object, _: object, lines: list[str]
) -> None:
    """Leave out the floors of modules, and what a constant's type says: its comment (#:) counts."""
    if kind == "data" and lines and lines[0] in (inspect.getdoc(type(of)) or "").splitlines()[:1]:
        lines.clear()
    elif kind == "module" and (floor := re.match(r"Floor \d+: (.)", lines[0])):
        lines[0] = floor[1].upper() + lines[0][floor.end() :]


def setup(app: Sphinx) -> None:
    """Connect them."""
    app.connect("autodoc-process-docstring", in_the_readers_words)
    app.connect("autodoc-skip-member", says_nothing)
    app.connect("source-read", complete)
    app.connect("build-finished", lead_to_the_start_page)
