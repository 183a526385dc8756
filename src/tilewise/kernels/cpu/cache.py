"""Keep compiled code on disk: in a folder that only its user can write, whole or not at all.

Code that a process loads is code that it runs. So nothing is loaded that another user could have
put there:

* The folder is the user's own, with no rights for others.
* No folder above it lets others rename things.
* Each file is checked against a digest, which a truncated file does not have.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from tilewise.folders import cache_folder, private_folder

_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """``kernels`` in ``$TILEWISE_CACHE``, else in ``tilewise`` of the user's cache folder."""
    return cache_folder().absolute() / "kernels"


class Cache:
    """The shared objects in a folder, by name.

    Raises:
        NotPrivate: the folder or one above it could be written by another user.
        OSError: it cannot be made.
    """

    def __init__(self, where: Path) -> None:
        self.where = private_folder(where)

    def find(self, name: str) -> Path | None:
        """Return the file of that name; None if it is not there, or not as it was written."""
        path = self.where / name
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(file, "rb") as opened:
            found = os.fstat(opened.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
            content = opened.read()
        body, digest = content[:-_DIGEST], content[-_DIGEST:]
        return path if hashlib.sha256(body).digest() == digest else None

    def draft(self) -> Path:
        """A new file with a name of its own, for ``keep``; the caller removes what is not kept."""
        file, path = tempfile.mkstemp(prefix="draft-", suffix=".so", dir=self.where)
        os.close(file)
        return Path(path)

    def keep(self, draft: Path, name: str) -> Path:
        """Give a finished draft its name, in one step: no process sees half of it."""
        content = draft.read_bytes()
        path = self.where / name
        # What stands behind the sections of a shared object is not looked at by who loads it.
        with draft.open("ab") as opened:
            opened.write(hashlib.sha256(content).digest())
            opened.flush()
            os.fsync(opened.fileno())
        draft.chmod(0o700)
        draft.replace(path)
        return path
