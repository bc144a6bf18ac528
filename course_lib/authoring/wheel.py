"""The wheel to upload to Colab: the package alone, of the whole wheel that pip has built.

    python -m course_lib.authoring.wheel build/wheel/course_lib-0.1.0-py3-none-any.whl build/colab

Of the 10.7 MB of the whole one, notebooks are 6.5 and the base model's weights 3.0. Who opens a notebook on Colab has
it already, and most chapters train from random weights. One project, one name: what is missing comes with the whole
wheel, and `course new` and `load_base` say so. What authors run is missing too, and of the source its comments and
docstrings, but for those that `course --help` tells.
"""

import bz2
import hashlib
import re
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

from course_lib.web.page import without_words

LEFT_OUT = (".ipynb", *(f"weights/speaks/{name}" for name in ("model.safetensors", "held_out.txt", "README.md")))
FOR_AUTHORS = ("course_lib/authoring/", "course_lib/web/")
TOLD_BY_HELP = ("course_lib/cli/", "options.py", "cluster/site.py", "labs/sheet.py")


def in_small(name: str) -> bool:
    """Whether the small wheel has that file of the whole one."""
    return not name.endswith(LEFT_OUT) and not name.startswith(FOR_AUTHORS)


def packed(name: str, content: bytes) -> tuple[str, bytes]:
    """Return a file as the small wheel has it: source without its words, a catalogue packed, no README."""
    if name.endswith(".dist-info/METADATA"):
        return name, content.partition(b"\n\n")[0] + b"\n"
    if name.endswith((".po", ".toml")) and not name.startswith("course_lib/templates/"):
        content = re.sub(rb"(?m)^#.*\n", b"", content)
    if name.endswith(".po"):
        return f"{name}.bz2", bz2.compress(content)
    return name, content if any(part in name for part in TOLD_BY_HELP) else without_words(name, content)


def write_small(whole: Path, folder: Path) -> Path:
    """Write the small wheel into a folder, under its name; raises ValueError if `whole` is no wheel of this course."""
    small = folder / whole.name
    if not whole.name.startswith("course_lib-") or not zipfile.is_zipfile(whole) or small.resolve() == whole.resolve():
        raise ValueError(f"{whole} is not a wheel of course_lib outside {folder}; make one: pip wheel --no-deps .")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        *names, record = filter(in_small, source.namelist())  # RECORD is last, and has a line a file
        files = dict(packed(name, source.read(name)) for name in names)
        lines = []
        for name, content in files.items():
            digest = urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.append(f"{name},sha256={digest},{len(content)}\n")
            target.writestr(name, content)
        target.writestr(record, "".join([*lines, f"{record},,\n"]))
    return small


if __name__ == "__main__":
    try:
        written = write_small(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, IndexError) as error:
        sys.exit(f"wheel: {error if isinstance(error, ValueError) else 'give the whole wheel and a folder'}")
    print(f"{written}: {written.stat().st_size / 1e6:.2f} MB")
