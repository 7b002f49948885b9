"""Output of a command, in Python; see helper/capture.c."""

from __future__ import annotations

import codecs
import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """With the rights of the slot's user, who may have put a link in our way; 0 is no other user."""
    if not uid:
        yield
        return
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


class Capture:
    """Head and tail of a stream with exact counts; the whole of it in a log once it is longer than the cap."""

    def __init__(self, max_chars: int, log_path: str, uid: int) -> None:
        self.head_chars = max_chars * 2 // 5
        self.max_chars = max_chars
        self.log_path = log_path
        self.uid = uid
        self.head = b""
        self.tail: bytes | None = None
        self.chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._log = -1

    def add(self, data: bytes) -> None:
        """More output."""
        self.chars += len(self._decoder.decode(data))
        if self.tail is None:
            self.head += data
            if self.chars > self.max_chars:
                self._truncate()
            return
        self._write_log(data)
        self.tail = (self.tail + data)[-self._tail_bytes() :]

    def _tail_bytes(self) -> int:
        return 4 * (self.max_chars - self.head_chars) + 4

    def _truncate(self) -> None:
        with contextlib.suppress(OSError), acting_as(self.uid):
            os.makedirs(os.path.dirname(self.log_path), exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._log = os.open(self.log_path, flags, 0o644)
        self._write_log(self.head)
        self.tail = self.head[-self._tail_bytes() :]
        self.head = self.head[: 4 * self.head_chars]

    def _write_log(self, data: bytes) -> None:
        if self._log < 0:
            return
        try:
            os.write(self._log, data)
        except OSError:  # the slot's disk is full: what fitted stays
            os.close(self._log)
            self._log = -1

    def finish(self) -> None:
        """An incomplete character at the end counts as one."""
        self.chars += len(self._decoder.decode(b"", True))
        if self.tail is None and self.chars > self.max_chars:
            self._truncate()
