"""Where the course is had from: the one address in pyproject.toml, as install cell and badges of every notebook."""

import re
import tomllib
from pathlib import Path

from nbformat.v4 import new_code_cell

INSTALL = "install"  # the id of the first code cell
_GITHUB = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+")
BADGES = re.compile(r"\s*^\[!\[Open in Colab\].*$", re.MULTILINE)
_URLS = re.compile(r"\n*^\[project\.urls\]\n(?:[^\[\n].*\n)*", re.MULTILINE)
_INSTALL_SOURCE = """# @title Install the course, if this Python does not have it
from importlib.util import find_spec

if find_spec("course_lib") is None:
    {then}"""
_FROM_ADDRESS = """course = "course-lib@git+{address}"
    get_ipython().run_line_magic("pip", f"install -q {{course}}")"""
_WITHOUT_ADDRESS = """raise ModuleNotFoundError(
        "course_lib is not installed here. Upload its wheel (`make wheel` in a clone "
        "writes it), then run `%pip install ./course_lib-*.whl` here."
    )"""


def repository(root: Path, named: str = "Repository") -> str | None:
    """The address that pyproject.toml names, or None while none is set; also that of another thing."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get(named)


def install_source(address: str | None) -> str:
    """The code of the install cell: it does nothing where the course is installed."""
    return _INSTALL_SOURCE.format(then=_FROM_ADDRESS.format(address=address) if address else _WITHOUT_ADDRESS)


def badges(address: str, name: str) -> str:
    """The badges that open the notebook `name` of the repository in Colab and in Kaggle."""
    path = f"{address.removeprefix('https://github.com/')}/blob/main/{name}"
    colab = f"https://colab.research.google.com/github/{path}"
    kaggle = f"https://www.kaggle.com/kernels/welcome?src=https://github.com/{path}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Kaggle](https://www.kaggle.com/static/images/open-in-kaggle.svg)]({kaggle}) "
        "(Kaggle: first set *Internet* to on in the notebook's settings.)"
    )


def add_address(nb, path: Path, root: Path) -> None:
    """Give a notebook what the address asks for: badges below its title, and the install cell before all other code."""
    address = repository(root)
    title = nb.cells[0]
    title.source = BADGES.sub("", title.source)
    if address:
        title.source += "\n\n" + badges(address, path.relative_to(root).as_posix())
    nb.cells = [cell for cell in nb.cells if cell.get("id") != INSTALL]
    codes = [index for index, cell in enumerate(nb.cells) if cell.cell_type == "code"]
    place = codes[0] if codes else len(nb.cells)
    if codes and "setup" not in nb.cells[place].metadata.get("tags", ()):
        place -= 1  # not between a text and the cell below it
    nb.cells.insert(place, new_code_cell(install_source(address), id=INSTALL))


def urls(address: str, hub: str | None = None) -> dict[str, str]:
    """What `[project.urls]` says of a repository of GitHub, and of a JupyterHub with nbgitpuller, if there is one."""
    owner, name = address.removeprefix("https://github.com/").split("/")
    named = {"Repository": address, "Documentation": f"https://{owner.lower()}.github.io/{name}/"}
    named |= {"Changelog": f"{address}/blob/main/docs/CHANGELOG.md", "Issues": f"{address}/issues"}
    return named | ({"JupyterHub": hub.rstrip("/")} if hub else {})


def write_address(address: str, root: Path, hub: str | None = None) -> list[Path]:
    """Write a repository's address into pyproject.toml, returned if changed; raises ValueError if not of GitHub."""
    if not _GITHUB.fullmatch(address):
        raise ValueError(f"REPOSITORY ({address!r}) must be https://github.com/owner/name")
    path = root / "pyproject.toml"
    before = _URLS.sub("\n", path.read_text(encoding="utf-8"))
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls(address, hub).items())
    return write_text(f"{before.rstrip()}\n\n[project.urls]\n{lines}", path)


def write_text(text: str, path: Path) -> list[Path]:
    """Write a file if it would change; returns it if it did."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return []
    path.write_text(text, encoding="utf-8")
    return [path]
