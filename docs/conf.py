"""Configuration of Sphinx."""

from __future__ import annotations

import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.ext.napoleon.docstring import NumpyDocstring
from sphinx.util.logging import getLogger

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))  # for docs.pictures

project = "annbatch-distributed"
_about = metadata(project)
author = _about["Author"]
copyright = f"2026, {author}"
version = release = _about["Version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_autodoc_typehints",  # after napoleon, whose fields it gives their types
    "sphinx_copybutton",
    "sphinx_reredirects",
    "sphinxext.opengraph",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates"]
default_role = "code"
highlight_language = "text"  # of blocks that don't name theirs
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# Every name that a signature or a page refers to leads somewhere.
nitpicky = True
nitpick_ignore = [
    ("py:class", "Module"),  # a type variable
    # a property, of which Sphinx tells where its type is defined
    ("py:class", "numpy.random._generator.Generator"),
]
# Building needs no network: what these pages name of other projects stands in
# inventories/, in Sphinx's first format, which is text. A line there is a name, what it
# is, and its page.
intersphinx_mapping = {
    name: (address, f"inventories/{name}.inv")
    for name, address in {
        "anndata": "https://anndata.scverse.org/en/stable/",
        "annbatch": "https://annbatch.readthedocs.io/en/stable/",
        "hypothesis": "https://hypothesis.readthedocs.io/en/latest/",
        "jax": "https://docs.jax.dev/en/latest/",
        "matplotlib": "https://matplotlib.org/stable/",
        "numpy": "https://numpy.org/doc/stable/",
        "pandas": "https://pandas.pydata.org/docs/",
        "python": "https://docs.python.org/3/",
        "torch": "https://docs.pytorch.org/docs/stable/",
        "zarr": "https://zarr.readthedocs.io/en/stable/",
    }.items()
}

# numpydoc sections only, with the types from the annotations
napoleon_google_docstring = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
always_use_bars_union = True
typehints_document_rtype_none = False
autodoc_class_signature = "mixed"
# what keeps its name where it is an annotation, and where that is explained
autodoc_type_aliases = {
    "AnyCollection": "annbatch_distributed.loader.collection.AnyCollection",
    "AnyPath": "annbatch_distributed.collect.harmonize.entries.AnyPath",
    "AnyMask": "annbatch_distributed.core.masks.AnyMask",
    "DistInfo": "annbatch_distributed.ranks.DistInfo",
    "Gather": "annbatch_distributed.checks.Gather",
    "Read": "annbatch_distributed.checks.Read",
    "Remainder": "annbatch_distributed.core.lanes.Remainder",
    "StoreLike": "zarr.storage.StoreLike",
    "Timeout": "annbatch_distributed.checks.Timeout",
    "Tree": "annbatch_distributed.integrations.jax.Tree",
}
autosummary_context = {
    # The members on the page of a class, in this order; all public ones of other classes.
    "shown": {
        "annbatch_distributed.EpochPlan": [
            "n_batches",
            "most_batches",
            "shard",
            "sizes",
            "selected",
            "dropped",
            "n_dropped",
            "n_dropped_batches",
            "n_repeated",
            "remaining",
            "rows_in_memory",
            "composition",
            "to_frame",
            "plot",
            "epoch",
            "n_obs",
            "n_streams",
            "n_processes",
            "batch_size",
            "remainder",
            "sharding",
        ],
        "annbatch_distributed.DistributedSampler": [
            "rank",
            "world_size",
            "batch_size",
            "virtual_ranks",
            "remainder",
            "shuffle",
            "mask",
            "weights",
            "rng",
            "epoch",
            "next_epoch",
            "batches_done",
            "sampler",
            "n_batches",
            "n_iters",
            "validate",
            "sample",
            "plan",
            "rows_of",
            "set_epoch",
            "state_dict",
            "load_state_dict",
            "reshard",
            "check_ranks_agree",
            "check_epoch_read",
        ],
        "annbatch_distributed.StatefulLoader": [
            "from_collection",
            "from_loader",
            "use_collection",
            "add_adatas",
            "add_datasets",
            "n_obs",
            "n_var",
            "sampler",
            "set_epoch",
            "next_epoch",
            "batches_done",
            "prefetch",
            "waited",
            "plan",
            "cells_of",
            "genes_measured",
            "step_done",
            "state_dict",
            "load_state_dict",
            "reshard",
            "to_dataloader",
            "check_ranks_agree",
            "check_epoch_read",
        ],
        "annbatch_distributed.loader.Sizes": [
            "chunk_size",
            "preload_nchunks",
            "batch_size",
            "n_dropped",
            "bytes_in_memory",
        ],
        "annbatch_distributed.CellSets": [
            "from_obs",
            "groups",
            "n_obs",
            "set_size",
        ],
        "annbatch_distributed.Shuffled": ["block_size"],
        "annbatch_distributed.Rows": [
            "from_indices",
            "from_mask",
            "to_array",
            "cyclic",
            "within",
            "to_global",
        ],
    }
}

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"

# what is copied are the lines that have a prompt, without it, or all where none has
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_copy_empty_lines = False  # they stand for output that is left out

# The address of the repository is in pyproject.toml alone: [a script](example:train.py)
_urls = dict(url.split(", ") for url in _about.get_all("Project-URL", []))
myst_url_schemes = {
    "http": None,
    "https": None,
    "mailto": None,
    "example": _urls["Source"] + "/tree/main/examples/{{path}}",
}

# old addresses of pages
redirects = {
    "agreement": "training-loop.html#what-the-checks-find",
    "aligned": "mixtures.html#several-modalities-of-the-same-cells",
    "coming-from": "migration.html",
    "elastic": "checkpoints.html#the-same-training-on-any-number-of-gpus",
    "failures": "checkpoints.html#restart-after-a-failure",
    "first-job": "two-ranks.html",
    "frameworks/accelerate": "hugging-face.html",
    "frameworks/torchdata": "../migration.html#from-torchdata-s-statefuldataloader",
    "frameworks/transformers": "hugging-face.html#trainer",
    "gpus": "launching.html#gpus",
    "launchers": "launching.html",
    "modalities": "prepare-data.html#layers-proteins-and-images",
    "object-storage": "performance.html#object-storage",
    "one-process": "quickstart.html",
    "parallelism": "launching.html#fsdp-tensor-and-pipeline-parallelism",
    "reading": "performance.html",
    "resume": "checkpoints.html",
    "sharding": "distribution.html#sharding",
    "sizes": "performance.html#sizes",
    "slurm": "launching.html#slurm",
    "steps": "debugging.html",
    "storage": "performance.html#compression",
    "tutorial": "distribution.html",
    "verify": "training-loop.html#what-the-checks-find",
    "virtual-ranks": "checkpoints.html#the-same-training-on-any-number-of-gpus",
    "workers": "performance.html#dataloader-workers",
    "your-files": "prepare-data.html",
}

ogp_site_url = _urls["Documentation"] + "/en/latest/"
ogp_social_cards = {"enable": False}

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_favicon = "_static/logo.svg"
html_theme_options = {
    "logo": {
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
        "text": project,
    },
    "navbar_persistent": [],  # the sidebar has a search field already
    "navigation_with_keys": False,
    "path_to_docs": "docs",
    "repository_branch": "main",
    "repository_url": _urls["Source"],
    "show_navbar_depth": 1,
    "use_issues_button": True,
    "use_repository_button": True,
}


# Napoleon reads no sections in the docstring of a property, and takes the words before a
# colon for its type. So these docstrings are parsed like docstrings of methods.
_properties: dict[str, list[str]] = {}


def _set_aside(
    _app: Sphinx,
    what: str,
    name: str,
    _obj: object,
    _options: object,
    lines: list[str],
) -> None:
    if what in {"attribute", "property"}:
        _properties[name] = list(lines)
        lines.clear()


def _bring_back(
    app: Sphinx,
    _what: str,
    name: str,
    obj: object,
    _options: object,
    lines: list[str],
) -> None:
    if (own := _properties.pop(name, None)) is not None:
        lines[:] = NumpyDocstring(own, app.config, app, "method", name, obj).lines()


_GIVEN = {
    "annbatch_distributed.EpochPlan",
    "annbatch_distributed.CellSets",
    "annbatch_distributed.loader.Sizes",
}


def _made_elsewhere(
    _app: Sphinx, _what: str, name: str, *_others: object
) -> tuple[str, str] | None:
    """Leave the arguments out of a class that users are given and never make."""
    return ("", "") if name in _GIVEN else None


def _check_drawings(app: Sphinx) -> None:
    """Warn if a drawing isn't what its script draws."""
    from docs.pictures import PICTURES

    for name, draw in PICTURES.items():
        if (Path(app.srcdir) / "_static" / name).read_text() != draw():
            getLogger(__name__).warning(
                "_static/%s isn't what its script draws: python -m docs.pictures",
                name,
            )


def setup(app: Sphinx) -> None:
    """Check the drawings, and step in before and after napoleon, whose priority is 500."""
    app.connect("builder-inited", _check_drawings)
    app.connect("autodoc-process-docstring", _set_aside, priority=400)
    app.connect("autodoc-process-docstring", _bring_back, priority=600)
    app.connect("autodoc-process-signature", _made_elsewhere, priority=400)
