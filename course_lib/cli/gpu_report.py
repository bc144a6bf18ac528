"""`course gpu-report`: what `make gpu-day` measured, as a page.

course gpu-report runs/gpu-day.json        # puts the table into docs/, and writes docs/GPU.md from it
course gpu-report                          # writes the page again from the table that is there
"""

import shutil
from pathlib import Path

from tyro.conf import Positional

from course_lib.validate import writable


def gpu_report(file: Positional[Path | None] = None, folder: Path = Path("docs")) -> int:
    """Write GPU.md from what `make gpu-day` measured on a GPU.

    Args:
        file: the table that `make gpu-day` wrote; without it, the one that is in the folder
        folder: where GPU.md and its table gpu_day.json are
    """
    from course_lib.labs.gpu_day import page, read_rows, summary  # here: `course --help` needs no torch

    table = folder / "gpu_day.json"
    rows = read_rows(file or table) if file or table.exists() else []
    writable("folder", folder)
    if file and file.resolve() != table.resolve():
        shutil.copyfile(file, table)
    (folder / "GPU.md").write_text(page(rows), encoding="utf-8")
    print(f"{folder / 'GPU.md'}: {summary(rows)}")
    return 0
