"""Nonsense on the command line is one line and exit code 2, before the work: every command, one wrong value at a time.

CALLS has of each command a call that works, what begins its work, and of each option the kind of its values. WRONG has
of each kind what cannot be meant. A file or folder of the table stands in the test's own folder.
"""

import json
import re

import pytest
import run_logs

from course_lib.launch import rendezvous
from course_lib.train import __main__ as train_script

from course_lib.cli import commands as cli  # isort: skip

DEEP = "[" * 100_000
SHAPE = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 256, "tied": False}
COLUMNS = "model,nodes,gpus,mbs,grad_acc,dp,pp,tp,zero,step_s"
ROW = "small,1,8,1,1,8,1,1,0,0.5"
MEASURED = {
    "lab": "05",
    "device": "cpu",
    "ranks": 4,
    "nodes": 1,
    "runs": [{"run": "dp=4", "step_s": 0.1, "tokens_per_s_per_gpu": 9.0, "peak_bytes": None, "sent_bytes": 8.0}],
}
FILES = {
    "day.json": '{"kind": "course gpu-day", "rows": []}',
    "models.json": json.dumps({"small": SHAPE}),
    "runs.csv": f"{COLUMNS}\n{ROW}\n",
    "deep.json": DEEP,
    "list.json": "[]",
    "torn.json": '{"small": ',
    "twice.json": f'{{"small": {json.dumps(SHAPE)}, "small": {json.dumps(SHAPE)}}}',
    "wrong_kind.json": '{"compute": "x", "small": 3}',
    "long.csv": f"{COLUMNS}\n{ROW}{'0' * 200_000}\n",
    "long_header.csv": f"{COLUMNS}{'x' * 200_000}\n{ROW}\n",
    "twice.csv": f"{COLUMNS},dp\n{ROW},8\n",
    "no_column.csv": "model,gpus\nsmall,8\n",
    "empty.csv": f"{COLUMNS}\n",
    "latin.csv": b"\xff\xfe\xfd",
    "measured.json": json.dumps(MEASURED),
    "not_finite.json": json.dumps(MEASURED).replace("0.1", "NaN"),
    "infinite.json": json.dumps(MEASURED).replace("0.1", "1e999"),
    "text.json": json.dumps(MEASURED).replace("0.1", '"fast"'),
    "no_ranks.json": json.dumps(MEASURED | {"ranks": 0}),
    "no_run.json": json.dumps(MEASURED | {"runs": []}),
    "other_runs.json": json.dumps(MEASURED | {"runs": 3}),
    "file": "",
    "notebooks/00_one.ipynb": json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}),
    "old.ipynb": "{}",
    "deep.ipynb": DEEP,
    "list.ipynb": "[]",
    "torn.ipynb": '{"cells": ',
    "latin.ipynb": b"\xff\xfe\xfd",
    "cells.ipynb": '{"cells": 3, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "step_is_text/log/rank0.jsonl": '{"step": "x", "loss": 1.0}\n',
    "loss_is_text/log/rank0.jsonl": '{"step": 1, "loss": "x"}\n',
    "time_is_text/log/rank0.jsonl": '{"event": "start", "time": "now"}\n',
}
JSON = ["missing.json", ".", "deep.json", "list.json", "torn.json", "twice.json", "wrong_kind.json", "latin.csv"]
WRONG = {
    "size": ["0", "-1", "2.5", "nan", "x", "99999999999999999999"],
    "count": ["-1", "2.5", "nan", "x", "99999999999999999999"],
    "positive": ["0", "-1", "nan", "inf", "x"],
    "amount": ["-1", "nan", "inf", "x"],
    "share": ["-1", "2", "nan", "inf", "x"],
    "word": ["nonsense"],
    "tokens": ["0", "-1", "2.5", "nan", "x", "4X", "1.0001K", "M", "99999999999999999999"],
    "link": ["nonsense", "nvme", "0", "-1", "nan", "inf", "1e3"],
    "name": ["a b", "$(ls)", "a;b"],
    "layout": ["nonsense", "dp=0", "dp=-1", "dp=²", "dp=2,dp=2", "dp=auto", "zero_stage=7", "micro_batches=1.5"],
    "file to write": ["missing/out", ".", "/dev/full", "file/out"],
    "folder to write": ["file", "file/below", "/proc/below"],
    "table to write": ["missing/out.csv", ".", "/dev/full", "file/out.csv", "points.txt"],
    "folder to read": ["missing", "file"],
    "gradebook": ["missing.db", "."],
    "models": [*JSON, "measured.json"],
    "calibration": [*JSON, "models.json"],
    "measured": [
        *JSON, "not_finite.json", "infinite.json", "text.json", "no_ranks.json", "no_run.json", "other_runs.json",
    ],
    "runs": [
        *["missing.csv", ".", "long.csv", "long_header.csv", "twice.csv", "no_column.csv", "empty.csv", "latin.csv"],
        *["deep.json", "file"],
    ],
    "logs": ["missing", "file", ".", "step_is_text", "loss_is_text", "time_is_text"],
    "chapter": ["99", "-1", "nonsense", "missing.ipynb"],
    "notebook": [
        *["99", "-1", "missing.ipynb", "old.ipynb", "deep.ipynb", "list.ipynb", "torn.ipynb", "latin.ipynb"],
        "cells.ipynb",
    ],
    "text": [],  # any text can be meant
    "flag": [],
}  # fmt: skip
SITE = dict.fromkeys(
    ("--partition", "--account", "--interface", "--hca", "--module", "--container", "--python"), "name"
)
DEVICE = {"--gpu": "word", "--memory": "positive", "--tflops": "positive", "--bandwidth": "positive"}
TECHNIQUES = {
    **dict.fromkeys(("--recipe", "--finetune", "--optimizer", "--offload", "--attention", "--precision"), "word"),
    **{"--lora-rank": "size", "--loss-chunks": "size"},
}
CLUSTER = DEVICE | {"--nodes-link": "link", "--inside": "link", "--per-node": "size", "--recipe": "word"}
CLUSTER |= {"--seq": "tokens"}
PREDICT = {"runs.csv": "runs", "--models": "models", "--out": "file to write", **CLUSTER}
CALLS = {  # command -> (a call that works, what begins its work, kinds: of its options, and of words that stand alone)
    "doctor": ("", "course_lib.cli.doctor.look_at_machine", {}),
    "new": (
        "mine",
        "course_lib.cli.notebooks.course_notebooks",
        {"mine": "folder to write", "--force": "flag", "--with-solutions": "flag"},
    ),
    "run": ("00", "nbclient.NotebookClient.execute", {"00": "notebook", "--timeout": "positive", "--save": "flag"}),
    "demo": ("", "course_lib.cli.demo.measured_rows", {}),
    "bench": ("", "course_lib.compare.bench.launch", {"--json": "flag", "--check": "flag", "--rounds": "size"}),
    "simulate": (
        "--model toy --layout dp=2 --seq 64",
        "course_lib.simulate.cluster.simulate_rank",
        DEVICE
        | TECHNIQUES
        | {"--model": "models", "--layout": "layout", "--seq": "tokens", "--stage": "count"}
        | {"--skew": "share", "--json": "flag"},
    ),
    "predict": (
        "runs.csv --models models.json --out out.csv",
        "course_lib.cli.predict.predict_rows",
        PREDICT
        | {"--calibration": "calibration", "--error-bars": "flag", "--breakdown": "flag", "--sensitivity": "flag"},
    ),
    "calibrate": ("runs.csv --models models.json --out out.json", "course_lib.cli.predict.predict_rows", PREDICT),
    "plan": (
        "models.json --gpus 8 --seq 512 --batch 8192",
        "course_lib.cli.plan.search",
        DEVICE
        | TECHNIQUES
        | {"models.json": "models", "--gpus": "size", "--seq": "tokens", "--batch": "tokens"}
        | {"--link": "link", "--inside": "link", "--per-node": "size", "--framework": "word", "--show": "size"}
        | {"--json": "flag", "--export": "folder to write"},
    ),
    "claims": (
        "",
        "course_lib.cli.claims.as_lines",
        {"--topic": "word", "--verdict": "word", "--word": "text", "--chapter": "word", "--json": "flag"},
    ),
    "watch": (
        "logs --once",
        "course_lib.train.watch.run_table",
        {"logs": "logs", "--once": "flag", "--json": "flag", "--every": "positive"},
    ),
    "gpu-report": ("day.json", "course_lib.labs.gpu_day.page", {"day.json": "measured", "--folder": "folder to write"}),
    "lab": (
        "05",
        "course_lib.cli.lab.sheet",
        {
            **{"05": "chapter", "--measured": "measured", "--folder": "folder to write", "--answers": "flag"},
            **{"--nodes": "size", "--gpus-per-node": "size", "--gpu": "word", "--nodes-link": "word"},
        },
    ),
    "grade": (
        "notebooks notebooks --out points.csv",
        "course_lib.checks.outside.grade_class",
        {"notebooks": "folder to read", "--out": "table to write", "--gradebook": "gradebook"},
    ),
    "cluster init": (
        "site",
        "pathlib.Path.write_text",
        SITE
        | {"site": "folder to write", "--force": "flag", "--nodes": "size", "--gpus-per-node": "count"}
        | {"--gres": "name", "--cpus-per-gpu": "size", "--memory-gib": "size", "--adapters": "name"}
        | {"--claim": "name", "--kind": "word"},
    ),
    "cluster check": (
        "",
        "course_lib.cluster.__main__.join_world",
        {
            **{"--layout": "layout", "--folder": "text", "--between": "word", "--message-mb": "size"},
            **{"--slower-than": "positive", "--backend": "text", "--json": "flag"},
        },  # what is wrong with a folder is what it looks for; join_world chooses the backend
    ),
    "train": (
        "--steps 4 --checkpoint kept --log-folder logs",
        "course_lib.train.trainer.join_world",
        {
            **{"--model": "word", "--layout": "layout", "--batch": "size", "--every": "size", "--keep": "size"},
            **{"--checkpoint": "folder to write", "--log-folder": "folder to write", "--in-background": "flag"},
            **{"--trace": "size", "--backend": "text", "--steps": "size", "--seq-len": "size", "--seed": "count"},
            **{"--learning-rate": "positive", "--weight-decay": "amount", "--clip-norm": "positive"},
            **{"--warmup": "count", "--compare-every": "count", "--decay": "word", "--precision": "word"},
            **{"--loss-chunks": "size"},
        },
    ),
}


class Begun(BaseException):
    """The work has begun: no handler of errors catches it."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The test's own folder, with FILES; scripts that end their process raise SystemExit."""
    monkeypatch.chdir(tmp_path)
    run_logs.write(tmp_path / "logs", 0, run_logs.steps(0, 3))
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(train_script, "end_script", end)
    monkeypatch.setattr(rendezvous, "end_script", end)
    return tmp_path


@pytest.fixture
def work(monkeypatch):
    def stop_at(name: str) -> None:
        def begin(*args, **options):
            raise Begun

        monkeypatch.setattr(name, begin)

    return stop_at


def changed(call: str, option: str, value: str) -> list[str]:
    """The words of a call with another value: of an option, or of the word that stands alone."""
    words = call.split()
    if not option.startswith("--"):
        return [value if word == option else word for word in words]
    if option in words:
        at = words.index(option)
        del words[at : at + 2]
    return [*words, option, value]


def outcome(words: list[str]) -> int | str:
    try:
        return cli.main(words)
    except SystemExit as end:
        return end.code
    except Begun:
        return "the work has begun"
    except Exception as error:
        return f"stack: {error!r}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # torch's own: the output is captured
@pytest.mark.parametrize("command", CALLS)
def test_a_value_that_cannot_be_meant_is_one_line_before_the_work(command, here, work, capsys):
    call, begins, kinds = CALLS[command]
    work(begins)
    assert outcome([*command.split(), *call.split()]) == "the work has begun"
    for option, kind in kinds.items():
        before = sorted(here.iterdir())
        for value in [*WRONG[kind], *[""] * (kind != "flag")]:
            capsys.readouterr()
            told = outcome([*command.split(), *changed(call, option, value)])
            said = capsys.readouterr().err
            assert told == 2, (option, value, told)
            assert said.count("\n") == 1 or "Error parsing" in said or "Invalid" in said, (option, value, said)
            assert "dummy" not in said and "Traceback" not in said, (option, value, said)
        assert sorted(here.iterdir()) == before, f"{option}: a refused call has left something"


@pytest.mark.slow
@pytest.mark.parametrize("command", CALLS)
def test_every_option_has_a_kind(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    options = set(re.findall(r"^[ │]+(--\w[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    assert options == {name for name in CALLS[command][2] if name.startswith("--")}


def test_every_command_has_a_call():
    assert {name.partition(" ")[0] for name in CALLS} == set(cli.COMMANDS)
