"""Every cell tagged `gpu` of every notebook, each with the statements above it that it needs, and what it says."""

import ast
from pathlib import Path

import pytest
from statements import cells_tagged, needed_by_cell

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CELLS = [(path, index) for path in sorted((ROOT / "notebooks").glob("*.ipynb")) for index in cells_tagged(path, "gpu")]


@pytest.mark.parametrize(("path", "index"), CELLS, ids=[f"{path.stem}, cell {index}" for path, index in CELLS])
def test_a_gpu_cell_runs(path, index, record, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a cell writes
    space = {"__name__": "__main__"}  # so that its functions travel to ranks by value
    for cell, statement in needed_by_cell(path, index):
        module = ast.fix_missing_locations(ast.Module([statement], []))
        exec(compile(module, f"{path.stem}, cell {cell}", "exec"), space)
    said = capsys.readouterr().out
    record(said=said[:3000])
    assert "no GPU here" not in said and "Here no GPUs" not in said
