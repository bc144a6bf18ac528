"""`course gpu-report`: what `make gpu-day` measured, as a page.

course gpu-report runs/gpu-day.json        # puts the table into docs/, and writes docs/GPU.md from it
course gpu-report                          # writes the page again from the table that is there
"""

import shutil
from pathlib import Path

from course_lib.labs.gpu_day import page, read_rows, summary
from course_lib.validate import writable


def gpu_report(file: Path | None, folder: Path) -> int:
    """Write GPU.md into a folder beside its table gpu_day.json: that of a file, or the one that is there already."""
    table = folder / "gpu_day.json"
    rows = read_rows(file or table) if file or table.exists() else []
    writable("folder", folder)
    if file and file.resolve() != table.resolve():
        shutil.copyfile(file, table)
    (folder / "GPU.md").write_text(page(rows), encoding="utf-8")
    print(f"{folder / 'GPU.md'}: {summary(rows)}")
    return 0
