"""Lines that are there whole or not at all."""

from __future__ import annotations

import os


def append_whole(descriptor: int, line: bytes) -> None:
    """Append all of a line or nothing, and raise OSError: a full disk takes a part, and a torn line with others after it costs a
    reader the file. The descriptor is open for appending, and this process is the only one that writes there."""
    begin = os.fstat(descriptor).st_size
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.ftruncate(descriptor, begin)
        raise
