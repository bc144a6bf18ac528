"""The site: lessons, exercises and reference as pages that need no server. `make site` builds build/site with it.

Sphinx with MyST-NB, because it reads the notebooks and documents where they lie, shows their stored outputs, fails on
a link that leads nowhere, has a search without a server, and comes by pip. Jupyter Book 2 and Quarto are programs
from elsewhere that fetch more; nbconvert has neither search nor previous and next.

    python -m sphinx -c docs/site . build/site        # any folder with notebooks/, exercises/ and docs/ in place of `.`
    COURSE_LANG=ko python -m sphinx -c docs/site ko build/site/ko        # the Korean edition, beside the English one
"""

import ast
import base64
import html
import importlib
import inspect
import json
import re
import shutil
from pathlib import Path
from urllib.parse import urlencode

import nbformat
from docutils import nodes
from sphinx import addnodes
from sphinx.search import SearchLanguage
from sphinx.search.en import ENGLISH_STOPWORDS

from course_lib.authoring import ROOT, tags_of
from course_lib.authoring.address import INSTALL, repository
from course_lib.authoring.links import NAVIGATION, chapters_of
from course_lib.language import language as spoken_here
from course_lib.language import told, told_svg
from course_lib.panels import asked

ADDRESS = repository(ROOT)
MATHJAX, LIVE = ROOT / "build" / "npm" / "node_modules" / "mathjax" / "es5" / "tex-svg.js", ROOT / "build" / "page"

language = spoken_here()
UP, BELOW = ("../", "ko/") if language == "ko" else ("", "")  # of the site's own address; the edition's place in it
PAGE = f"page/{BELOW if (LIVE / BELOW).is_dir() else ''}index.html"
OTHER = ("en", "English", "../") if language == "ko" else ("ko", "한국어", "ko/")
project, author = told("Distributed training"), "the course's authors"
html_title, root_doc = told("Distributed training, from one GPU to all five parallelisms"), "notebooks/index"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
include_patterns = [
    "notebooks/*.ipynb", "exercises/*.ipynb", "docs/labs/*.md", "docs/site/*.md",
    *(f"docs/{name}.md" for name in ("SYMBOLS", "CLAIMS", "GLOSSARY", "PREDICTOR")),
    *(f"docs/{name}.md" for name in ("TEACHING", "GRADING", "SHARED_MACHINES")),
]  # fmt: skip
exclude_patterns = ["build", "runs", "shared", "course_lib", "tests", "**/.*"]
nitpicky, nitpick_ignore_regex = True, [("py:.*", ".*")]  # links, not the types of signatures

nb_execution_mode = "off"
nb_code_prompt_show, nb_code_prompt_hide = told("Show the {type}"), told("Hide the {type}")
myst_enable_extensions, myst_heading_anchors = ["dollarmath"], 3
autodoc_default_options = {"undoc-members": True, "no-value": True}
autodoc_typehints_format, python_display_short_literal_types = "short", True
add_module_names = False

html_theme, html_copy_source, html_show_sphinx = "furo", False, False
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
html_static_path, html_css_files, html_js_files = ["site.css", "site.js", str(MATHJAX)], ["site.css"], ["site.js"]
mathjax_path = MATHJAX.name  # formulas as SVG: one file, no fonts
mathjax3_config = {"options": {"enableMenu": False}, "svg": {"fontCache": "global"}}


# What the pages are, from the folder that is built


def pages(folder: Path) -> dict[str, list[str]]:
    """The pages of a folder with notebooks/, exercises/ and docs/, by heading, in reading order."""
    lessons = chapters_of(folder / "notebooks")
    in_depth = sorted(path.name for path in (folder / "notebooks").glob("*_in_depth.ipynb"))
    exercises = sorted(path.name for path in (folder / "exercises").glob("*.ipynb"))
    documents = ["site/cheat_sheet", "SYMBOLS", "CLAIMS", "GLOSSARY", "PREDICTOR", "site/api", "site/english"]
    teaching = [
        "TEACHING",
        "GRADING",
        "SHARED_MACHINES",
        *(f"labs/{path.stem}" for path in sorted((folder / "docs/labs").glob("*.md"))),
    ]
    named = {
        told("Lessons"): [f"notebooks/{name}" for name in lessons],
        told("In depth"): [f"notebooks/{name}" for name in in_depth],
        told("Exercises"): [f"exercises/{name}" for name in exercises],
        told("Reference"): [f"docs/{name}.md" for name in documents],
        told("Teaching and labs"): [f"docs/{name}.md" for name in teaching],
    }
    return {head: [name for name in names if (folder / name).exists()] for head, names in named.items()}


def contents(folder: Path) -> str:
    """The tables of contents behind the side bar, previous and next, as MyST."""
    tables = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {head}", "", *(f"/{name}" for name in names), "```"])
        for head, names in pages(folder).items()
        if names
    ]
    return "\n\n".join(tables)


# A notebook as a page


def picture(output, name: str, app) -> str | None:
    """An output's picture as HTML: SVG inside the page, where it follows its colours, PNG as a file beside it."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return f'<div class="picture">{told_svg(data["image/svg+xml"])}</div>'
    if "image/png" not in data:
        return None
    shown = output.metadata["image/png"]
    path = Path(app.outdir) / "_images" / f"{name.replace('/', '-')}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(data["image/png"]))
    words, there = shown.get("alt") or told("Picture"), f"{'../' * (name.count('/'))}_images/{path.name}"
    size = "".join(f' {key}="{shown[key]}"' for key in ("width", "height") if key in shown)
    return f'<div class="picture"><img src="{there}" alt="{html.escape(told(words))}"{size} loading="lazy"></div>'


def live(source: str, docname: str) -> str:
    """The link from a cell's panel to the same panel on the page that computes, where that is built; else nothing."""
    found = re.search(r"^from (course_lib\.panels\.\w+) import ([A-Z_]+)$", source, re.MULTILINE)
    if found is None or not LIVE.is_dir():
        return ""
    panel = getattr(importlib.import_module(found[1]), found[2])
    (place,) = (name for name, listed in asked.PANELS.items() if listed.panel is panel)
    page = f"{UP}{'../' * docname.count('/')}{PAGE}"
    return f'<p><a href="{page}#{place}">{told("Move its controls in the browser")}</a></p>'


def other(folder: Path, docname: str) -> str:
    """The address, from a page, of the same page in the other language, or of that edition's first; "" without one."""
    there = folder.parent if language == "ko" else folder / "ko"
    found = {name for name in (docname, root_doc) if any(there.glob(f"{name}.[im]*"))} | {"search"}
    if root_doc not in found:
        return ""
    return f"{'../' * docname.count('/')}{OTHER[2]}{docname if docname in found else root_doc}.html"


def switch(folder: Path, docname: str) -> str:
    """The link to the other language, which keeps the page, and with site.js the place in it."""
    to = other(folder, docname)
    return f'<a href="{to}" hreflang="{OTHER[0]}" lang="{OTHER[0]}">{OTHER[1]}</a>' if to else ""


def opened_by(name: str) -> str:
    """The line of links that open a notebook: what the address allows, and the file itself."""
    links = [f"{{download}}`{told('download for JupyterLab')} <{Path(name).name}>`"]
    if ADDRESS:
        where, hub = ADDRESS.removeprefix("https://github.com/"), repository(ROOT, "JupyterHub")
        name = f"{BELOW}{name}"
        path = f"{where}/blob/main/{name}"
        links += [f"[Colab](https://colab.research.google.com/github/{path})"]
        links += [f"[Kaggle](https://www.kaggle.com/kernels/welcome?src=https://github.com/{path})"]
        pulled = urlencode({"repo": ADDRESS, "branch": "main", "urlpath": f"lab/tree/{where.split('/')[1]}/{name}"})
        links += [f"[JupyterLab]({hub}/hub/user-redirect/git-pull?{pulled})"] if hub else []
    return f"{told('Open this notebook:')} {' · '.join(links)}"


def notebook_page(nb, docname: str, app):
    """A notebook as the site shows it: without badges and solutions, folded as in JupyterLab, pictures with words."""
    cells = []
    for cell in nb.cells:
        if cell.id in (INSTALL, NAVIGATION[1]):
            continue
        if cell.id == "title":
            cell.source = re.sub(r"\s*^\[!\[Open in Colab\].*$", "", cell.source, flags=re.MULTILINE)
        if cell.id == NAVIGATION[0]:
            cell.source = re.sub(r" · \[[^\]]*\]\([^)]*solutions/[^)]*\)", "", cell.source)
            cell.source = re.sub(rf"\[{OTHER[1]}\]\([^)]*\)", switch(Path(app.srcdir), docname), cell.source)
            cell.source += f"\n\n{opened_by(docname + '.ipynb')}"
        folded = cell.metadata.get("jupyter", {})
        hidden = {"hide-input": folded.get("source_hidden"), "hide-output": folded.get("outputs_hidden")}
        cell.metadata["tags"] = tags_of(cell) + [tag for tag, is_hidden in hidden.items() if is_hidden]
        for number, output in enumerate(cell.get("outputs", [])):
            if drawn := picture(output, f"{docname}-{cell.id}-{number}", app):
                output.data = {"text/html": drawn + live(cell.source, docname)}
        cells.append(cell)
    if docname == root_doc:
        if LIVE.is_dir():
            words = told("Panels, planner and claims that compute in the browser")
            cells[1].source += f"\n\n<a href='{UP}../{PAGE}'>{words}</a>"
        cells.append(nbformat.v4.new_markdown_cell(contents(Path(app.srcdir)), id="contents"))
    nb.cells = cells
    return nb


# Names that the lessons use


def is_module(name: str) -> bool:
    """Whether a name of the package is a file or a folder of it."""
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def used(folder: Path) -> dict[str, set[str]]:
    """The names of the package that the lessons of a folder import, by module."""
    names: dict[str, set[str]] = {}
    for path in (folder / "notebooks" / name for name in chapters_of(folder / "notebooks")):
        cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        tree = ast.parse("\n".join(cells))
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "course_lib":
                for alias in node.names:
                    if is_module(name := f"{node.module}.{alias.name}"):
                        modules[alias.asname or alias.name] = name
                    else:
                        names.setdefault(node.module, set()).add(alias.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                names.setdefault(modules[node.value.id], set()).add(node.attr)
    return dict(sorted(names.items()))


def api(folder: Path) -> str:
    """The directives that document what the lessons use, a module a heading."""
    parts = []
    for module, names in used(folder).items():
        members = f".. automodule:: {module}\n   :members: {', '.join(sorted(names))}"
        parts.append(f"## `{module}`\n\n```{{eval-rst}}\n{members}\n```\n")
    return "\n".join(parts)


def as_written(app, what, name, obj, options, lines) -> None:
    """A docstring's first sentence as text and the rest as it is written: its columns are part of it."""
    if what == "module" or not lines:
        del lines[1 if what == "module" else 0 :]
    text = [re.sub(r"([\\*_|])", r"\\\1", lines[0]).replace("`", "``") if lines else "", ""]
    if any(line.strip() for line in lines[1:]):
        text += [".. code-block:: text", "", *(f"   {line}" for line in lines[1:]), ""]
    lines[:] = text


def plain_types(app, what, name, obj, options, signature: str | None, returns: str | None):
    """A signature with the types alone: what checks them at a call is left out, as the docstring says it in words."""
    check = r"functools\.partial\(<function .*?>.*?\)|<function .*?>"
    types = rf"Annotated\[((?:[^\[\]]|\[[^\]]*\])+?), (?:{check})\]"
    return re.sub(types, r"\1", signature or "") or signature, returns


def is_field(app, what, name, obj, skip, options) -> bool | None:
    """Skip the fields of a record, which its docstring tells; the rest is as autodoc would have it."""
    return True if what == "class" and not (inspect.isroutine(obj) or isinstance(obj, property)) else None


# What Sphinx calls


def read_source(app, docname: str, source: list[str]) -> None:
    """What is read in place of a notebook, and of the page of names."""
    if Path(app.env.doc2path(docname)).suffix == ".ipynb":
        source[0] = json.dumps(notebook_page(nbformat.reads(source[0], as_version=4), docname, app))
    elif docname == "docs/site/api":
        source[0] += api(Path(app.srcdir))


def mend_links(app, doctree) -> None:
    """Links to files of the repository that are no pages: to its address, or, while there is none, their words."""
    links = [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]
    for link in links:
        words = [child.deepcopy() for child in link.children]
        english = Path(f"{link.get('reftarget')}.md")
        if UP and english.is_file():  # which the Korean edition has not
            there = english.relative_to(ROOT).with_suffix(".html").as_posix()
            there = f"{'../' * app.env.docname.count('/')}{UP}{there}"
            link.replace_self(nodes.reference("", "", *words, refuri=there))
            continue
        target = (Path(app.srcdir) / app.env.relfn2path(link.get("reftarget") or ".", app.env.docname)[0]).resolve()
        is_page = target.suffix in (".ipynb", ".pdf") and target.parent.name != "solutions"
        if is_page or not target.exists() or target in (ROOT, *ROOT.parents):
            continue
        there = f"{ADDRESS}/blob/main/{target.relative_to(ROOT).as_posix()}" if ADDRESS else ""
        link.replace_self(nodes.reference("", "", *words, refuri=there) if there else words)


class SearchKorean(SearchLanguage):
    """Words are found without the particle at their end; the English words among them as they are."""

    lang, language_name, stopwords = "ko", "Korean", ENGLISH_STOPWORDS
    END = r"(?<=[가-힣\w]{2})(에서|으로|까지|부터|처럼|보다|마다|에는|을|를|이|가|은|는|의|에|로|와|과|도|만)$"
    js_stemmer_code = f"class Stemmer {{ stemWord(word) {{ return word.replace(/{END}/, ''); }} }}"

    def stem(self, word: str) -> str:
        """The word as the index has it."""
        return re.sub(self.END, "", word.lower())


def for_all_readers(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """The switch of languages, and what a checker of accessibility finds in what the theme and MyST-NB write."""
    tree = context.get("furo_navigation_tree", "")
    tree = tree.replace('role="heading"', 'role="heading" aria-level="2"')
    context["furo_navigation_tree"] = f'<p class="switch">{switch(Path(app.srcdir), pagename)}</p>{tree}'
    context["body"] = context.get("body", "").replace(' aria-label="Toggle hidden content"', "")


def finish(app, failed) -> None:
    """The first page at the folder's own address, and the page that computes beside it, where that is built."""
    if failed or app.builder.format != "html":
        return
    first = f'<!doctype html><html lang="{language}"><meta charset="utf-8"><title>{project}</title>'
    first += f'<meta http-equiv="refresh" content="0; url={root_doc}.html"><a href="{root_doc}.html">{html_title}</a>'
    (Path(app.outdir) / "index.html").write_text(first + "</html>\n", encoding="utf-8")
    if LIVE.is_dir() and not UP:
        shutil.copytree(LIVE, Path(app.outdir) / "page", dirs_exist_ok=True)


def tell_theme(app) -> None:
    """The theme's own words in Korean, where Sphinx has none for them."""
    templates = getattr(app.builder, "templates", None)
    if UP and templates:
        of_sphinx, of_many = (templates.environment.globals[name] for name in ("gettext", "ngettext"))
        templates.environment.install_gettext_callables(lambda text: told(of_sphinx(text)), of_many)


def setup(app) -> None:
    """Connect the above."""
    app.connect("builder-inited", tell_theme)
    app.add_search_language(SearchKorean)
    app.connect("source-read", read_source)
    app.connect("doctree-read", mend_links, priority=100)  # before Sphinx copies what is linked to
    app.connect("autodoc-process-docstring", as_written)
    app.connect("autodoc-process-signature", plain_types)
    app.connect("autodoc-skip-member", is_field)
    app.connect("html-page-context", for_all_readers, priority=900)  # after the theme
    app.connect("build-finished", finish)
