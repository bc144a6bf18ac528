"""A JupyterLab of its own in a temporary folder, and a headless Chromium to look at it.

Everything is on loopback, with a token and a free port; settings, runtime files and notebooks lie in that folder.
"""

import functools
import http.server
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from course_lib.authoring import ROOT

MARK = "COURSE_BROWSER_TEST"  # every process that the server starts inherits it, so that a leftover can be found
WORKSPACE = ROOT / "course_lib" / "templates" / "default-37a8.jupyterlab-workspace"  # the left side closed
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": '{"windowingMode": "none"}',  # cells out of sight stay in the page
    "@jupyterlab/apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab, its folder, and the mark that its processes carry."""

    url: str
    token: str
    folder: Path
    mark: str

    def page_of(self, notebook: str) -> str:
        """The address of a notebook in the folder."""
        return f"{self.url}/lab/tree/{notebook}?token={self.token}"

    def set_theme(self, name: str) -> None:
        """Choose how the next page that is opened looks."""
        write_setting(self.folder.parent, "@jupyterlab/apputils-extension/themes", f'{{"theme": "{name}"}}')


def write_setting(place: Path, name: str, text: str) -> None:
    """Write a user's setting of JupyterLab, below the folder of a test."""
    path = place / "settings" / f"{name}.jupyterlab-settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def processes_marked(mark: str) -> list[psutil.Process]:
    """Every live process that was started, however indirectly, by the server with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # it ended while we looked, or it is not ours
    return found


@pytest.fixture(scope="session")
def chromium():
    """Path of a Chromium on this machine."""
    path = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if path is None:
        pytest.skip("no Chromium found; install it (Debian, Ubuntu: apt-get install chromium)")
    return path


@pytest.fixture
def page(chromium):
    """A page of a headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    with playwright.sync_playwright() as running:
        flags = ["--no-sandbox", "--disable-background-networking", "--disable-dev-shm-usage"]
        browser = running.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1300, "height": 1500})
        page.set_default_timeout(60_000)
        try:
            yield page
        finally:
            browser.close()


@pytest.fixture(scope="module")
def address(request):
    """The folder that make TARGET built, build/TARGET, on the loopback; TARGET is the test module's."""
    target = request.module.TARGET
    if not (ROOT / "build" / target / "index.html").is_file():
        pytest.skip(f"no build/{target}; make {target} builds it")
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *args: None})
    handler = functools.partial(quiet, directory=ROOT / "build" / target)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def asked(page):
    """The addresses that the page asks for from now on."""
    found = []
    page.on("request", lambda request: found.append(request.url))
    return found


def serious(page) -> dict[str, list[str]]:
    """What axe-core, if make page or make site has brought it, finds serious on a page: rule -> where."""
    axe = ROOT / "build" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.is_file():
        return {}
    page.evaluate(axe.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations")
    bad = [one for one in found if one["impact"] in ("serious", "critical")]
    return {one["id"]: [node["html"][:200] for node in one["nodes"][:3]] for one in bad}


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab that is shut down afterwards; it fails the test if a process of it is left."""
    token, mark, port = secrets.token_hex(16), secrets.token_hex(8), _free_port()
    folder = tmp_path / "notebooks"
    folder.mkdir()
    log = (tmp_path / "jupyter.log").open("w")
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    server = subprocess.Popen(command, env=_environment(tmp_path, token, mark), cwd=folder, stdout=log, stderr=log)
    here = Lab(f"http://127.0.0.1:{port}", token, folder, mark)
    try:
        _wait_until_up(here, server, tmp_path / "jupyter.log")
        yield here
    finally:
        left = _shut_down(here, server)
        log.close()
    assert left == [], f"left after shutdown: {left}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(tmp_path: Path, token: str, mark: str) -> dict[str, str]:
    for name, text in SETTINGS.items():
        write_setting(tmp_path, name, text)
    (tmp_path / "workspaces").mkdir()
    shutil.copy(WORKSPACE, tmp_path / "workspaces")  # the page of `make lab`
    own = {
        "JUPYTERLAB_SETTINGS_DIR": tmp_path / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": tmp_path / "workspaces",
        "JUPYTER_CONFIG_DIR": tmp_path / "config",
        "JUPYTER_RUNTIME_DIR": tmp_path / "runtime",
        "IPYTHONDIR": tmp_path / "ipython",
        "JUPYTER_TOKEN": token,
        MARK: mark,
    }
    inherited = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}  # pictures go to the page
    return inherited | {name: str(value) for name, value in own.items()}


def _wait_until_up(lab: Lab, server: subprocess.Popen, log: Path, limit_s: float = 180) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert server.poll() is None, f"JupyterLab ended while starting:\n{log.read_text()}"
        try:
            with urllib.request.urlopen(f"{lab.url}/api/status?token={lab.token}", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise TimeoutError(f"JupyterLab did not answer within {limit_s:.0f} s:\n{log.read_text()}")


def _shut_down(lab: Lab, server: subprocess.Popen, limit_s: float = 20) -> list[str]:
    """Ask the server to end, wait for everything it started; what is left is named, then ended by its pid."""
    request = urllib.request.Request(f"{lab.url}/api/shutdown?token={lab.token}", method="POST")
    try:
        urllib.request.urlopen(request, timeout=10).close()
        server.wait(limit_s)
    except (OSError, subprocess.TimeoutExpired):
        server.terminate()
    deadline = time.monotonic() + limit_s
    while (left := processes_marked(lab.mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = [f"{process.pid} {' '.join(process.cmdline())[:120]}" for process in left]
    for process in left:
        process.kill()
    server.wait(10)
    return names
