"""A rank's log as a file that kernel and rank trust: of this user, and nothing but a file."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path


def open_log(path: Path) -> int:
    """Open a log, or make it, for whoever writes or reads it. In a directory where others may write, what lies under
    this name may be theirs. Raises OSError, whose ``strerror`` says what it is, for anything but a file of this user's
    own."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as refusal:
        if refusal.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} there is a link") from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        told = f"{path.name} there is no ordinary file"
    elif found.st_nlink > 1:
        told = f"{path.name} there has another name, too"
    elif found.st_uid != os.geteuid() and found.st_uid != _uid_in(path.parent):
        told = f"{path.name} there belongs to another user"
    else:
        return fd
    os.close(fd)
    raise OSError(errno.EPERM, told)


def _uid_in(folder: Path) -> int:
    """Whose a file is that this process makes there: some network file systems have their own idea of users."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
