"""Settings of the site that `make docs` builds from the pages of this folder: Sphinx, MyST, furo.

The pages stay plain Markdown that a code host shows as it is. Three things are added to what Sphinx reads:

- the navigation: the headings of index.md with the pages that it links below each; pages that it does not name follow
  under the last heading;
- where a page has `<!-- made from the code: NAME -->`, what `site_reference.py` makes of the code under that name;
- a way to files outside of this folder: a reader of the site downloads them.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "src")]

from site_reference import MADE_FROM_CODE  # noqa: E402

from seqloom.version import __version__  # noqa: E402

project, author, copyright = "Seqloom", "the Seqloom authors", "the Seqloom authors, Apache-2.0"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Seqloom {__version__}"
html_copy_source = False
html_show_sphinx = False
myst_heading_anchors = 4
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # types are named without their module, and two classes are called Batch
pygments_style, pygments_dark_style = "friendly", "monokai"

HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([\w/-]+)\.md\)")
PLACE = re.compile(r"<!-- made from the code: ([a-z ]+) -->")


def navigation(index: str) -> str:
    """Return a hidden toctree for every heading of the index, of the pages that are linked below it."""
    _, *parts = HEADING.split(index)
    named = [(title, LINK.findall(text)) for title, text in zip(parts[::2], parts[1::2], strict=True)]
    listed = {page for _, pages in named for page in pages} | {"index"}
    pages = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
    named[-1][1].extend(page for page in pages if page not in listed)
    trees = (
        "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", *pages, "```"]) for title, pages in named if pages
    )
    return "\n\n".join(trees)


def read_page(app: object, name: str, source: list[str]) -> None:
    """Add to a page what the site has and the plain page does not."""
    text = source[0].replace("](../../", "](path:../../") if "/" in name else source[0].replace("](../", "](path:../")
    if name == "index":
        text += "\n" + navigation(text)
    source[0] = PLACE.sub(lambda match: MADE_FROM_CODE[match[1]](), text)


def setup(app: object) -> None:
    """Let Sphinx read pages through `read_page`."""
    app.connect("source-read", read_page)
