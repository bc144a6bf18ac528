"""From what the ranks reported to one readable error in the cell."""

import linecache
import os
import re
import signal
import sys
import sysconfig
import textwrap
import traceback
from pathlib import Path

from course_lib.language import told
from course_lib.launch._rank import Failure, Frame

COLUMNS = 98  # of a line that is not code
_OF_LAUNCH = ("_rank.py", "_processes.py", "_fork_server.py", "<string>")  # in whose frames no fault of a rank lies

# What a rank says when *another* rank went away. It is never the one to blame.
_SECONDARY = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|Socket Timeout|Timed out waiting|failed to connect|"
    r"remote process exited|communicator was aborted|Socket closed|DistNetworkError|connectFullMesh failed",
    re.IGNORECASE,
)
# An error of torch's own; what the function opened itself fails with another kind, such as ConnectionRefusedError.
_OF_TORCH = re.compile(r"(RuntimeError|torch\.[\w.]*Error|Dist\w*Error)\b")
_HOW = {  # by Failure.kind
    "start": "could not start:",
    "load": "could not load the function (what a function uses must be importable, or be defined in the notebook):",
    "exception": "failed:",
    "exit": "called sys.exit before its function returned:",
    "result": "returned something that cannot be sent back "
    "(numbers, tensors, and lists, dicts, dataclasses of them can):",
}
STOPPED = "stood still: a signal (SIGSTOP) or a debugger has stopped it"
NOT_MET = "had not met all other ranks"
_NOT_BEGUN = (
    "The function had not begun: ranks could not connect to each other. It is not to blame;",
    "another process may hold their connections, or a firewall or a debugger may stop them.",
)
_HANGING = (
    "Do all ranks call the same collectives, in the same order, with the same shapes and dtypes?",
    'os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" before the next launch lets PyTorch compare them.',
    "If the work takes longer, pass a larger timeout=.",
)
_STACK_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))


class RankError(RuntimeError):
    """A launch failed. The text names the rank that failed first, its node if there are several, and its traceback."""

    def __init__(self, text: str, rank: int | None = None, node: str | None = None):
        super().__init__(text)
        self.rank = rank
        self.node = node

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of the launcher's own traceback."""
        return [f"RankError: {told(str(self))}"]


class Interrupted(KeyboardInterrupt):
    """The cell was interrupted during a launch. The text says where the ranks stood."""

    def _render_traceback_(self) -> list[str]:
        """The learner's own lines, and no line of the package or of a library."""
        frames = [frame[:3] for frame in traceback.extract_tb(self.__traceback__) if not _is_library(frame[0])]
        return [f"{format_frames(frames)}KeyboardInterrupt: {told(str(self))}"]


def interrupted_text(world_size: int, places: dict[int, str]) -> str:
    first = f"the launch of {world_size} rank{'s' * (world_size > 1)} was interrupted, and its ranks were ended"
    return "\n".join([first, *place_lines(places, {})])


def is_secondary(failure: Failure) -> bool:
    """Whether this failure is only the echo of another rank's, who went away, perhaps while they still connected."""
    return failure.kind in ("exception", "start") and any(
        _OF_TORCH.match(text) and _SECONDARY.search(text) and not _raised_by_function(frames)
        for frames, text in failure.chain
    )


def _raised_by_function(frames: list[Frame]) -> bool:
    """Whether a `raise` of the learner's own made the error, and no call into torch."""
    if not frames or _is_library(frames[-1][0]):
        return False
    file, line, _ = frames[-1]
    linecache.checkcache(file)
    return re.search(r"\braise\b", linecache.getline(file, line)) is not None


def first_failure(failures: dict[int, Failure]) -> int:
    """The rank to blame: the earliest failure that is not an echo."""
    return min(failures, key=lambda rank: (is_secondary(failures[rank]), failures[rank].when))


def failure_text(rank: int, world_size: int, watch, stderr: str) -> str:
    """The whole error: which rank (on which node, if there are several), why, its traceback, what the others did."""
    failures, nodes = watch.failures, watch.nodes
    failure = failures[rank]
    how = _HOW.get(failure.kind) or _death(failure.exit_code)
    parts = [f"rank {rank} of {world_size}{_on_node(rank, nodes)} {how}"]
    for frames, text in failure.chain:
        shown = format_frames(frames)
        parts.append(shown + text if text else shown.rstrip("\n"))
    if failure.kind == "died" and stderr.strip():
        last_lines = ["  " + line[:500] for line in stderr.strip().splitlines()[-8:]]
        parts.append("\n".join(["the last that it wrote to stderr:", *last_lines]))
    if echoes := [str(other) for other in sorted(failures) if other != rank]:
        parts.append(
            f"rank{'s' if len(echoes) > 1 else ''} {', '.join(echoes)} failed too, at the same time or because of it"
        )
    parts += place_lines(watch.places, nodes)
    return "\n".join(part for part in parts if part)


def place_lines(places: dict[int, str], nodes: dict[int, str]) -> list[str]:
    """Where ranks stood, a line each; the end of a long one on a line of its own, indented as a traceback's source."""
    lines = (told(f"rank {rank}{_on_node(rank, nodes)} {place}") for rank, place in sorted(places.items()))
    wrapper = textwrap.TextWrapper(COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [wrapper.fill(line) for line in lines]


def _on_node(rank: int, nodes: dict[int, str]) -> str:
    return f" on {nodes[rank]}" if rank in nodes else ""


def hang_text(world_size: int, timeout: float, watch) -> str:
    what = (
        f"time limit: after {timeout:g} s the launch of {world_size} ranks had not finished, and its ranks were ended"
    )
    has_begun = not any(place.startswith(NOT_MET) for place in watch.places.values())
    return "\n".join([what, *place_lines(watch.places, watch.nodes), *(_HANGING if has_begun else _NOT_BEGUN)])


def _death(code: int | None) -> str:
    """How a process ended that could say nothing itself."""
    if code is None:
        return "was lost: the process that starts ranks has ended"
    if code >= 0:
        return f"ended with exit code {code} before its function returned (os._exit?)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hints = {
        "SIGKILL": "; often this is the system's out-of-memory killer: use a smaller model or batch, or fewer ranks",
        "SIGABRT": "; in gloo often tensors of different shapes or types in one collective",
        "SIGSEGV": "; a crash in native code",
    }
    return f"was killed by {name}{hints.get(name, '')}"


def format_frames(frames: list[Frame]) -> str:
    """Frames as Python shows them; those of notebook cells begin with `Cell`."""
    files = {file for file, _, _ in frames}
    for file in files:
        linecache.checkcache(file)
    text = "".join(traceback.StackSummary.from_list([traceback.FrameSummary(*frame) for frame in frames]).format())
    for file in files:
        text = text.replace(f'File "{file}"', _cell_name(file) or f'File "{file}"')
    return text


def _cell_name(file: str) -> str | None:
    """`Cell` for the code of a notebook cell. Without its number: that changes when cells are run again."""
    ipython = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if ipython is None:
        return None
    if not hasattr(ipython.compile, "format_code_name"):  # IPython 7, as on Colab and Kaggle
        return "Cell" if Path(file).parent.name.startswith("ipykernel_") or "<ipython-input" in file else None
    name = ipython.compile.format_code_name(file)
    return name[0] if name else None


def describe_place(frames: list[Frame], tensors: str = "") -> str:
    """Where a rank stands, in the learner's terms: the innermost line of their code, and the call that it is inside.

    tensors   what a call of torch.distributed was given, if the rank could tell
    """
    if not frames:
        return "gave no answer (it is inside native code that holds the interpreter)"
    own = [index for index, (file, _, _) in enumerate(frames) if not _is_library(file)]
    here = own[-1] if own else len(frames) - 1
    file, line, name = frames[here]
    linecache.checkcache(file)
    source = linecache.getline(file, line).strip()
    callees = [callee for _, _, callee in frames[here + 1 :] if callee != "wrapper"]
    inside = f" (inside {callees[0]}{' of ' * bool(tensors)}{tensors})" if callees else ""
    return f"stood at {_cell_name(file) or file}, line {line}, in {name}: {source}{inside}"


def _is_library(file: str) -> bool:
    return (_cell_name(file) is None and file.startswith("<")) or os.path.abspath(file).startswith(_LIBRARIES)


def frames_in_stack_file(text: str) -> list[Frame]:
    """The main thread's frames in what faulthandler wrote, outermost first."""
    blocks = re.split(r"(?m)^(?:Current thread|Thread) .*$", text)
    frames: list[Frame] = []
    for block in blocks[1:]:  # the main thread comes last; a thread without Python frames leaves its block empty
        found = [(match["file"], int(match["line"]), match["name"]) for match in _STACK_LINE.finditer(block)]
        if found:
            frames = found[::-1]
    return [frame for frame in frames if not frame[0].endswith(_OF_LAUNCH)]
