"""Opens a rank's log, if the file can be trusted: it is a regular file that belongs to this user."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path


def open_log(path: Path) -> int:
    """Open a log, or create it, for reading and writing. In a directory where others may write, they may have created
    something of this name. Raises OSError for anything but this user's own file; its ``strerror`` is the reason."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as refusal:
        if refusal.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} there is a link") from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        reason = f"{path.name} there is not a regular file"
    elif found.st_nlink > 1:
        reason = f"{path.name} there has several hard links"
    elif found.st_uid != os.geteuid() and found.st_uid != _uid_in(path.parent):
        reason = f"{path.name} there belongs to another user"
    else:
        return fd
    os.close(fd)
    raise OSError(errno.EPERM, reason)


def _uid_in(folder: Path) -> int:
    """The owner of files that this process makes there: some network file systems map user ids."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
