"""Configuration of Sphinx."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "annbatch-distributed"
author = "the annbatch-distributed developers"
copyright = f"2026, {author}"
release = installed_version("annbatch-distributed")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# numpydoc sections only, with the types from the annotations
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Returns"]  # prose: otherwise its first line is taken for the type
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
# a bare `name` is code: inventories of other projects are not fetched, so that building needs no network
default_role = "code"
highlight_language = "text"  # of blocks that don't name theirs

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_title = project
html_theme_options = {"use_repository_button": False, "show_navbar_depth": 1}


# Napoleon takes what precedes a colon in the first line of an attribute's docstring for its type. These are sentences.
_sentences: dict[str, list[str]] = {}


def _set_aside(_app: Sphinx, what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    if what in {"attribute", "property"}:
        _sentences[name] = list(lines)


def _bring_back(_app: Sphinx, _what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    lines[:] = _sentences.pop(name, lines)


def setup(app: Sphinx) -> None:
    """Step in before and after napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", _set_aside, priority=400)
    app.connect("autodoc-process-docstring", _bring_back, priority=600)
