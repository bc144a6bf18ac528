"""Messages between processes that share nothing but a folder: the notebook, and ranks on the nodes of a Slurm job.

No socket joins them. The folder belongs to one launch, every node sees it, and only its owner can enter it (mode 700):
the messages are pickles, as between a launch on one machine and its own processes, and who could write them could run
code as the owner.
"""

import pickle
import struct
from pathlib import Path

POLL_S = 0.05
_LENGTH = struct.Struct("<I")


class FileLink:
    """One direction of talk between two processes that share a folder: messages appended to one file.

    The file is made before anybody looks for it, and read by opening it anew: a network file system then shows what
    was written, while it may go on for half a minute not to show a new file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._read_bytes = 0

    def make(self) -> "FileLink":
        self._path.touch(mode=0o600)
        return self

    def send(self, *message) -> None:
        content = pickle.dumps(message)
        with self._path.open("ab", buffering=0) as file:
            file.write(_LENGTH.pack(len(content)) + content)

    def receive(self) -> list[tuple]:
        """The messages that have come since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        messages = []
        while len(content) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(content)[0]
            if len(content) < end:
                break
            messages.append(pickle.loads(content[_LENGTH.size : end]))
            content = content[end:]
            self._read_bytes += end
        return messages
