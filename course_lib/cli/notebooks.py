"""`course run` and `course new`: a chapter without a browser, and the notebooks in a folder of the learner's."""

import importlib.metadata
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tyro.conf import Positional

from course_lib.validate import PACKAGE_ALONE, number, writable

ROOT = Path(__file__).resolve().parents[2]
MAX_TIMEOUT_S = 1_000_000
_FOLDERS = ("notebooks", "exercises", "solutions")
_KOREAN = "ko"
_TO_SOLUTIONS = re.compile(
    " · \\[(Solutions|풀이)\\]\\(\\.\\./solutions/\\w+\\.ipynb\\)".encode()
)  # in a line of links


def find_notebook(name: str, root: Path | None = None) -> Path:
    """The notebook that a learner means: a path, a stem, or a chapter's number.

    root     where the folder notebooks/ is; without it the current folder, or else the clone
    Raises   ValueError, with the chapters that exist
    """
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name).resolve()
    root = root or (Path.cwd() if Path("notebooks").is_dir() else ROOT)
    chapters = sorted((root / "notebooks").glob("*.ipynb"))
    found = [path for path in chapters if path.stem == name]
    if number := re.fullmatch(r"(\d+)([a-z]?)", name):  # names a lesson, not its second reading
        start = re.compile(rf"{int(number[1]):02d}{number[2] or '[a-z]?'}_")
        found += [path for path in chapters if start.match(path.stem) and "_in_depth" not in path.stem]
    if len(found) == 1:
        return found[0]
    if found:
        lessons = ", ".join(path.stem for path in found)
        raise ValueError(f"chapter {name!r} has several lessons: {lessons}; give a number with its letter")
    known = ", ".join(path.stem for path in chapters) or "none: `course new DIR` writes them, then call this in DIR"
    raise ValueError(f"no chapter {name!r}; give a number, a stem or the path of a notebook. Chapters here: {known}")


def run_chapter(chapter: Positional[str], timeout: float = 120.0, save: bool = False) -> int:
    """Execute a chapter without a browser; say which cell failed.

    Args:
        chapter: a number (03), a stem, or the path of a notebook
        timeout: most seconds for one cell
        save: store the outputs in the notebook; without it the file is left alone
    """
    path = find_notebook(chapter)
    number("timeout", timeout, above=0, most=MAX_TIMEOUT_S)
    try:
        import nbformat
        from jupyter_client import KernelManager
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
        from tqdm import tqdm
        from traitlets.config import Config
    except ModuleNotFoundError as error:
        raise ValueError(f"course run needs {error.name}: pip install {error.name}") from error
    if save:
        writable("the notebook's folder", path.parent)
    try:
        nb = nbformat.read(path, as_version=4)
        nbformat.validate(nb)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, nbformat.ValidationError) as error:
        raise ValueError(f"{path} is no notebook ({type(error).__name__}); give a file that Jupyter opens") from error
    total = sum(cell.cell_type == "code" for cell in nb.cells)
    at = {"cell": None, "number": 0}
    start = time.monotonic()
    with tqdm(total=total, desc=path.stem, unit="cell", disable=None) as bar:
        client = NotebookClient(
            nb,
            timeout=timeout,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
            config=Config(KernelManager=_encryption(KernelManager)),
        )

        def note_start(cell, cell_index):
            at.update(cell=cell, number=at["number"] + (cell.cell_type == "code"))

        client.on_cell_execute = note_start
        client.on_cell_complete = lambda cell, cell_index: bar.update(cell.cell_type == "code")
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(_failure(path, at["cell"], at["number"], total, error), file=sys.stderr)
            return 1
    print(f"{path.stem}: {total} code cells ran in {time.monotonic() - start:.1f} s")
    if save:
        from course_lib.authoring import normalise, write

        print(f"{path.name}: {'outputs stored' if write(normalise(nb), path) else 'nothing changed'}")
    return 0


def _encryption(kernel_manager: type) -> dict[str, str]:
    """Have cells and outputs encrypted on the loopback, where Jupyter can: jupyter_client 8.9 or later."""
    return {"transport_encryption": "auto"} if hasattr(kernel_manager, "transport_encryption") else {}


def _failure(path: Path, cell, number: int, total: int, error: Exception) -> str:
    errors = [output for output in cell.outputs if output.output_type == "error"]
    trace = "\n".join(errors[-1].traceback) if errors else str(error).strip()
    return f"\n{path.stem}: code cell {number} of {total} failed, id {cell['id']}:\n\n{cell.source}\n\n{trace}"


def course_notebooks() -> dict[str, Path]:
    """The notebooks that come with the course, by their place in it: of a clone, or as the wheel installed them."""
    if (ROOT / "pyproject.toml").is_file():
        files = [path for root in (ROOT, ROOT / _KOREAN) for name in _FOLDERS for path in (root / name).glob("*.ipynb")]
        return {path.relative_to(ROOT).as_posix(): path for path in sorted(files)}
    installed = importlib.metadata.files("course-lib") or []
    files = [Path(path.locate()) for path in installed if path.suffix == ".ipynb"]
    return {"/".join(path.parts[-3 if path.parts[-3] == _KOREAN else -2 :]): path for path in sorted(files)}


def new_course(folder: Positional[Path], force: bool = False, with_solutions: bool = False) -> int:
    """Write chapters and exercises into a folder of your own, where what you change stays.

    Args:
        folder: made if it is not there; a notebook in it that differs from the course's is kept
        force: overwrite notebooks that differ
        with_solutions: the solutions of the exercises too, and the links to them
    """
    writable("folder", folder)
    notebooks = course_notebooks()
    if not notebooks:
        raise ValueError(f"there are no notebooks to write: {PACKAGE_ALONE}")
    written, kept, sign = 0, [], _signer()
    for name, source in notebooks.items():
        text = source.read_bytes()
        if not with_solutions:
            if "solutions" in name.split("/"):
                continue
            text = _TO_SOLUTIONS.sub(b"", text)
        target = folder / name
        if target.exists() and not force and target.read_bytes() != text:
            kept += [name] if _cells(target.read_bytes()) != _cells(text) else []
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
        sign(text)
        written += 1
    print(f"{written} notebooks are in {folder}; start with {Path('notebooks') / 'index.ipynb'}")
    if kept:
        print(f"kept, as their cells differ from the course's (--force overwrites them): {', '.join(kept)}")
    return 0


def _signer() -> Callable[[bytes], object]:
    """Return what has JupyterLab trust a notebook as it is: of others it shows no SVG before its cell has run."""
    if not importlib.util.find_spec("nbformat"):
        return len  # without nbformat there is no JupyterLab, and nothing to sign for
    import nbformat
    from nbformat.sign import NotebookNotary

    try:
        notary = NotebookNotary()
    except OSError:  # a home that cannot be written has no list of what is trusted
        return len
    return lambda text: notary.sign(nbformat.reads(text.decode(), as_version=4))


def _cells(text: bytes) -> list[str] | bytes:
    """What a reader may have changed in a notebook: its cells' text. JupyterLab writes the rest in its own way."""
    try:
        return ["".join(cell["source"]) for cell in json.loads(text)["cells"]]
    except (ValueError, KeyError, TypeError):
        return text  # no notebook any more
