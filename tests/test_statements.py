"""What a cell of a notebook needs of the cells above it."""

import ast
import json

from statements import cells_tagged, needed_by_cell

CELLS = [
    "import torch\n%matplotlib inline",
    "model = 1\nother = 2",
    "def use():\n    return helper() + model",
    "def helper():\n    return 1",
    "model = 3\nfor other in range(3):\n    print(other)",
    "if torch:\n    other = 5\n    print(other, use())",
    "model = 4",
]


def test_a_cell_needs_the_last_that_made_a_name_and_what_its_functions_look_up(tmp_path):
    cells = [{"cell_type": "code", "metadata": {"tags": ["gpu"] * (i == 5)}, "source": s} for i, s in enumerate(CELLS)]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert cells_tagged(path, "gpu") == [5]
    chosen = [(cell, ast.unparse(statement).split("\n")[0]) for cell, statement in needed_by_cell(path, 5)]
    assert chosen == [
        (0, "import torch"), (2, "def use():"), (3, "def helper():"), (4, "model = 3"), (5, "if torch:"),
    ]  # fmt: skip
