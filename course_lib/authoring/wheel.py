"""The wheel to upload to Colab: the package alone, of the whole wheel that pip has built.

    python -m course_lib.authoring.wheel build/wheel/course_lib-0.1.0-py3-none-any.whl build/colab

Of the 10.7 MB of the whole one, notebooks are 6.5 and the base model's weights 3.0. Who opens a notebook on Colab has
it already, and most chapters train from random weights. One project, one name: what is missing comes with the whole
wheel, and `course new` and `load_base` say so.
"""

import sys
import zipfile
from pathlib import Path

LEFT_OUT = (".ipynb", "weights/speaks/model.safetensors")


def write_small(whole: Path, folder: Path) -> Path:
    """Write the wheel without notebooks and weights into a folder, under the same name; return its path.

    Raises   ValueError if `whole` is no wheel of this course
    """
    small = folder / whole.name
    if not whole.name.startswith("course_lib-") or not zipfile.is_zipfile(whole) or small.resolve() == whole.resolve():
        raise ValueError(f"{whole} is not a wheel of course_lib outside {folder}; make one: pip wheel --no-deps .")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(small, "w") as target:
        for file in source.infolist():
            content = source.read(file)
            if file.filename.endswith(".dist-info/RECORD"):  # a line a file: its path, digest and size
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not line.split(",")[0].endswith(LEFT_OUT)).encode()
            if not file.filename.endswith(LEFT_OUT):
                target.writestr(file, content, zipfile.ZIP_DEFLATED, 9)
    return small


if __name__ == "__main__":
    try:
        written = write_small(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, IndexError) as error:
        sys.exit(f"wheel: {error if isinstance(error, ValueError) else 'give the whole wheel and a folder'}")
    print(f"{written}: {written.stat().st_size / 1e6:.2f} MB")
