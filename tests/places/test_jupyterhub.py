"""JupyterHub: two log in, each opens a kernel of one shared installation, and their launches take turns.

The hub is real, with its own proxy; its test authenticator takes every name, its test spawner starts all as this user.
"""

import ast
import asyncio
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import requests
from harness import free_port
from places.environments import made_environment, run
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from course_lib.authoring import ROOT

PROXY = ROOT / "build/npm/node_modules/.bin/configurable-http-proxy"
TEACHING = (ROOT / "docs" / "TEACHING.md").read_text(encoding="utf-8")
SETTINGS = re.search(r"```python\n(c\..*?)```", TEACHING, re.DOTALL)[1]  # and the test's ports, folders and users
SETTINGS += """
c.JupyterHub.authenticator_class, c.JupyterHub.spawner_class = "dummy", "simple"
c.DummyAuthenticator.allow_all, c.SimpleLocalProcessSpawner.home_dir_template = True, "FOLDER/{username}"
c.JupyterHub.bind_url, c.JupyterHub.hub_port = "http://127.0.0.1:PORT", HUB_AT
c.ConfigurableHTTPProxy.api_url, c.ConfigurableHTTPProxy.command = "http://127.0.0.1:PROXY_AT", ["PROXY"]
c.Spawner.cmd += ["--allow-root"]
"""
RANKS = 4
CELL = """
import os, time, course_lib
from course_lib.launch import launch
def work():
    begun = time.time()
    time.sleep(3)
    return begun, time.time()
print(course_lib.__file__, os.environ["COURSE_MAX_RANKS"])
print(list(launch(work, 4)))
"""


@pytest.fixture
def installation(wheel, tmp_path):
    """The course, installed once where nobody may write, and its kernel that all users see."""
    folder, kernel = tmp_path / "shared", tmp_path / "shared" / "share" / "jupyter" / "kernels" / "course"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "course", wheel)
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "course", "language": "python", "env": {"PYTHONPATH": f"{folder}/course"}}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    run("chmod", "-R", "a-w", folder)
    yield folder
    run("chmod", "-R", "u+w", folder)


@pytest.fixture
def hub(installation, tmp_path, monkeypatch):
    """The address of a hub that has started."""
    if not shutil.which("node") or not PROXY.exists():
        pytest.skip("no proxy here: make test-jupyterhub installs it with npm")
    python, port, settings = made_environment(sys.executable, "jupyterhub"), free_port(), SETTINGS
    for named, value in {
        **{"/srv/hub/bin": python.parent, "/srv/course": installation, "/run/course": tmp_path, '"32"': f'"{RANKS}"'},
        **{"FOLDER": tmp_path, "PORT": port, "HUB_AT": free_port(), "PROXY_AT": free_port(), "PROXY": PROXY},
    }.items():
        assert named in settings
        settings = settings.replace(named, str(value))
    (tmp_path / "config.py").write_text(settings)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with (tmp_path / "log").open("w") as log:
        hub = subprocess.Popen([python, "-m", "jupyterhub", "-f", "config.py"], cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/hub/health")
        yield f"http://127.0.0.1:{port}/"
    finally:
        hub.terminate()  # and with it the servers and the proxy that it started
        hub.wait(60)
        print((tmp_path / "log").read_text()[-3000:])


def wait_for(address: str, headers: dict[str, str] | None = None, seconds: float = 120) -> None:
    """Return once an address answers; before that it may refuse connections."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        try:
            if requests.get(address, headers=headers, timeout=10).ok:
                return
        except requests.ConnectionError as refused:
            print(refused)
        time.sleep(0.5)
    raise AssertionError(f"{address} does not answer")


def opened_kernel(hub: str, name: str) -> HTTPRequest:
    """Log in by the form, as people do, start a server, in it a kernel of the course; what asks for its channels."""
    session = requests.Session()
    form = re.search(r'name="_xsrf" value="([^"]+)"', session.get(f"{hub}hub/login").text)[1]
    session.post(f"{hub}hub/login", data={"username": name, "password": "x", "_xsrf": form}).raise_for_status()
    asked = session.post(f"{hub}hub/api/users/{name}/tokens?_xsrf={session.cookies.get('_xsrf')}", json={})
    headers, own = {"Authorization": f"token {asked.json()['token']}"}, f"{hub}user/{name}/api/"
    requests.post(f"{hub}hub/api/users/{name}/server", headers=headers).raise_for_status()
    wait_for(f"{own}status", headers)
    kernel = requests.post(f"{own}kernels", headers=headers, json={"name": "course"}).json()["id"]
    return HTTPRequest(f"{own.replace('http', 'ws', 1)}kernels/{kernel}/channels", headers=headers)


async def printed(kernel: HTTPRequest, code: str) -> str:
    """Have a kernel run a cell; what the cell prints."""
    channels, text = await websocket_connect(kernel), ""
    header = {"msg_id": "asked", "msg_type": "execute_request", "username": "", "session": "test", "version": "5.3"}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": {"code": code}, "channel": "shell"}
    await channels.write_message(json.dumps(message))
    while True:
        told = json.loads(await channels.read_message())
        assert told["msg_type"] != "error", told["content"]
        if told["parent_header"].get("msg_id") == "asked":
            text += told["content"]["text"] if told["content"].get("name") == "stdout" else ""
            if told["content"].get("execution_state") == "idle":
                return text


def test_two_users_share_an_installation_that_nobody_writes_and_their_ranks_take_turns(hub, installation):
    before, spans = {path: path.stat().st_mtime_ns for path in installation.rglob("*")}, []

    async def at_once(kernels: list[HTTPRequest]) -> list[str]:
        return await asyncio.wait_for(asyncio.gather(*(printed(kernel, CELL) for kernel in kernels)), 240)

    for text in asyncio.run(at_once([opened_kernel(hub, name) for name in ("ann", "ben")])):
        package, ranks = text.splitlines()
        assert package == f"{installation}/course/course_lib/__init__.py {RANKS}"
        begun, ended = zip(*ast.literal_eval(ranks), strict=True)
        assert len(begun) == RANKS and max(begun) < min(ended), "the four of one launch run together"
        spans.append((min(begun), max(ended)))
    (_, first_ends), (second_begins, _) = sorted(spans)
    assert first_ends <= second_begins, "eight ranks ran at once, though COURSE_MAX_RANKS is four"
    assert {path: path.stat().st_mtime_ns for path in installation.rglob("*")} == before
