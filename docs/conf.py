"""The documentation site: `make docs` builds it into docs/_build/html/VERSION."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import myst_nb.core.render
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from nbformat.v4 import new_output
from sphinx.application import Sphinx

import silograph

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from generate import write_reference  # noqa: E402

project, author = "silograph", "The silograph maintainers"
copyright = author
release = version = silograph.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
html_theme = "furo"
html_title = f"silograph {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["filter.js"]
html_show_sourcelink = False
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"  # browsers know it; MathJax would be loaded from another host
nb_execution_mode = "cache"
nb_execution_in_temp = True  # what a notebook writes is gone afterwards
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
# Cells of tutorials run `silograph`, also where its environment is not activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
napoleon_use_rtype = False
suppress_warnings = ["config.cache"]
# Links to files beside docs, such as benchmarks, are names of files on the site.
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|src|tests|examples)[^)]*|[A-Z]+\.\w+)\)"
)


def name_outside_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace links that leave the documentation by the files' names."""
    del app, name
    in_parentheses = re.compile(rf"\({OUTSIDE.pattern}\)")
    source[0] = in_parentheses.sub(r"(\1: `\2`)", source[0])
    source[0] = OUTSIDE.sub(r"\1 (`\2`)", source[0])


def join_streams(outputs: list[Any]) -> list[Any]:
    """Join the pieces of 100 bytes in which shell cells print; myst-nb would break lines there."""
    joined: list[Any] = []
    names = dict.fromkeys(("stdout", "stderr"), "")
    for output in outputs:
        if output["output_type"] == "stream":
            names[output["name"]] += output["text"]
        else:
            joined.append(output)
    streams = [new_output("stream", name=n, text=text) for n, text in names.items() if text]
    return streams + joined


def write_inline_math(translator: Any, node: nodes.math) -> None:
    """Write a formula within a line as MathML."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def write_math_block(translator: Any, node: nodes.math_block) -> None:
    """Write a formula with a line of its own as MathML."""
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Write what follows from the code, and connect to the build."""
    write_reference(HERE / "reference")
    myst_nb.core.render.coalesce_streams = join_streams
    app.add_html_math_renderer("mathml", (write_inline_math, None), (write_math_block, None))
    app.connect("source-read", name_outside_files)
