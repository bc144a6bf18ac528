"""The page's folder: whole, small, of what the package has; and the refusals of its builder. tests/browser opens it."""

import ast
import gzip
import io
import json
import re
import subprocess
import sys
import zipfile

import pytest

from course_lib.authoring import ROOT
from course_lib.language import spoken, told
from course_lib.panels.asked import PANELS, described
from course_lib.web.page import FROM_NPM, LOADER, LOCK, STDLIB, said_by_page, write_page


def unpacked(page, name):
    return gzip.decompress((page / f"{name}.packed").read_bytes())


def zipped(page, name):
    return zipfile.ZipFile(io.BytesIO(unpacked(page, name)))


@pytest.fixture(scope="module")
def pyodide(tmp_path_factory):
    """What npm would bring, with nothing in it."""
    folder = tmp_path_factory.mktemp("pyodide")
    for name in (LOADER, *FROM_NPM):
        (folder / name).write_bytes(name.encode())
    (folder / LOCK).write_text(json.dumps({"info": {"python": "3"}, "packages": {"numpy": {}}}))
    with zipfile.ZipFile(folder / STDLIB, "w") as library:
        for name in ("json/__init__.py", "unittest/mock.py", "encodings/utf_8.py", "encodings/cp1252.py", "ssl.py"):
            library.writestr(name, "")
    return folder


@pytest.fixture(scope="module")
def page(pyodide, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "page"
    write_page(folder, pyodide)
    return folder


def test_the_page_holds_what_its_python_needs_packed_and_nothing_else(page):
    written = {str(path.relative_to(page)) for path in page.rglob("*") if path.is_file()}
    own = {"index.html", "page.css", "page.js", "worker.js", "arithmetic.zip.packed", "first.json.packed"}
    own.add(f"pyodide/{STDLIB}.packed")
    korean = {f"ko/{name}" for name in ("index.html", "first.json.packed", "words.zip.packed")}
    assert written == own | korean | {f"pyodide/{LOADER}"} | {f"pyodide/{name}.packed" for name in FROM_NPM}
    assert unpacked(page, "pyodide/pyodide.asm.wasm") == b"pyodide.asm.wasm"
    assert json.loads(unpacked(page, f"pyodide/{LOCK}")) == {"info": {"python": "3"}, "packages": {}}
    assert zipped(page, f"pyodide/{STDLIB}").namelist() == ["json/__init__.py", "encodings/utf_8.py", "ssl.py"]
    assert sum((page / name).stat().st_size for name in own) < 400_000  # beside Python itself


def test_pictures_of_the_start_are_stored(page):
    first = json.loads(unpacked(page, "first.json"))
    assert list(first["panels"]) == list(PANELS) and all(one["svg"] for one in first["panels"].values())
    assert {"id", "claim", "answer", "source"} < set(first["claims"][0])


def test_the_korean_page_says_what_the_package_tells_in_korean(page):
    first = json.loads(unpacked(page, "ko/first.json"))
    with spoken("ko"):
        assert first["panels"]["zero"] == described("zero")
        assert first["panels"]["zero"]["said"] == told(PANELS["zero"].panel.answer().said)
    html = (page / "ko" / "index.html").read_text(encoding="utf-8")
    assert '<html lang="ko">' in html and '"../index.html"' in html and '"../page.js"' in html
    assert [text for text in said_by_page() if f">{text}<" in html] == []
    assert all(max(first["words"][text]) >= "가" for text in said_by_page())


def test_code_travels_without_its_words_and_is_the_same_code(page):
    name = "course_lib/units.py"
    sent = zipped(page, "arithmetic.zip").read(name).decode()
    here = (ROOT / name).read_text(encoding="utf-8")
    assert '"""Numbers' in here and '"""Numbers' not in sent and "#" not in sent
    functions = [[node.name for node in ast.parse(text).body if hasattr(node, "args")] for text in (sent, here)]
    assert functions[0] == functions[1] != []


def test_nothing_is_asked_of_another_server(page):
    text = "".join((page / name).read_text() for name in ("page.js", "worker.js", "page.css"))
    html = (page / "index.html").read_text()
    assert re.findall(r"https?://", text + html) == []
    assert "default-src 'self'" in html


def test_the_arithmetic_alone_answers_a_plan_where_torch_and_numpy_are_not(page, tmp_path):
    zipped(page, "arithmetic.zip").extractall(tmp_path)
    code = (
        "import sys, json\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "for name in ('torch', 'numpy', 'matplotlib'): sys.modules[name] = None\n"
        "from course_lib.panels.asked import answer\n"
        "import course_lib\n"
        "assert course_lib.__file__.startswith(sys.argv[1])\n"
        "print(json.dumps(answer({'do': 'plan', 'words': {'gpus': '8', 'batch': '512K'}})))"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "accelerate_fsdp2.yaml" in json.loads(done.stdout)["files"], done.stderr[-2000:]


def test_a_folder_that_is_no_page_is_left_alone_and_a_missing_file_is_named(pyodide, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than a page; give an empty folder"):
        write_page(tmp_path, pyodide)
    with pytest.raises(ValueError, match=r"lacks pyodide.mjs, .*; give the folder of npm's package pyodide"):
        write_page(tmp_path / "page", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.exhaustive
def test_the_same_page_is_written_twice(page, pyodide, tmp_path):
    write_page(tmp_path / "page", pyodide)
    for path in page.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "page" / path.relative_to(page)).read_bytes()
