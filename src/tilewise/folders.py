"""The user's folders: what can be made again, and what lasts as long as a process."""

import os
import stat
import tempfile
from pathlib import Path


class NotPrivate(OSError):  # noqa: N818  reads as what is wrong
    """Another user could write into a folder that must be this user's alone."""


def cache_folder() -> Path:
    """``$TILEWISE_CACHE``, or ``tilewise`` in the user's cache folder; it need not be there."""
    own = os.environ.get("TILEWISE_CACHE")
    if own:
        return Path(own)
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "tilewise"


def runtime_folder() -> Path:
    """Return the folder for locks of this user's processes; it need not be there.

    ``tilewise`` in the user's runtime folder: ``$XDG_RUNTIME_DIR``, else ``/run/user/<uid>``. Where
    neither is private (``sudo`` hands on the variable of another user), ``tilewise-<uid>`` in the
    system's temporary folder. Others can write there, so open it with ``private_folder``.
    """
    me = os.geteuid()
    for user in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{me}"):
        if user:
            try:
                _check_private(Path(user))
            except OSError:
                continue
            return Path(user) / "tilewise"
    return Path(tempfile.gettempdir()) / f"tilewise-{me}"


def private_folder(where: Path) -> Path:
    """Make a folder that only its user can write, or check one that is there.

    Returns:
        its path without links: a link on the way could be bent after the check.

    Raises:
        NotPrivate: the folder or one above it could be written by another user.
        OSError: it cannot be made.
    """
    missing = [path for path in (where, *where.parents) if not path.exists()]
    for path in reversed(missing):
        # Each with its own mode: what mkdir makes on the way may be open to the group.
        path.mkdir(mode=0o700, exist_ok=True)
    _check_private(where)
    return where.resolve()


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step, and its folder: whoever reads meanwhile sees the one before.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, draft = tempfile.mkstemp(prefix=".draft-", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        Path(draft).chmod(0o644)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _check_private(where: Path) -> None:
    """Refuse a folder that is not the user's alone, or that others could replace."""
    if not hasattr(os, "geteuid"):
        raise NotPrivate("who can write a folder is only known on POSIX systems")
    me = os.geteuid()
    found = where.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivate(f"{where} is no folder of its own (a link, perhaps)")
    if found.st_uid != me or found.st_mode & 0o077:
        raise NotPrivate(
            f"{where} is not private: it has owner {found.st_uid} and mode "
            f"{stat.S_IMODE(found.st_mode):o}; required are owner {me} and mode 700"
        )
    for parent in where.resolve().parents:
        above = parent.stat()
        shared = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
        if shared or above.st_uid not in (0, me):
            raise NotPrivate(
                f"{where} is not private: {parent}, above it, has owner {above.st_uid} and mode "
                f"{stat.S_IMODE(above.st_mode):o}, so that others could replace it"
            )
