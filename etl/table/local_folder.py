"""File operations in a local folder that follow no link: `opened`, `listed`, `remove` and `replace`.

They open each folder of a path by the descriptor of the folder above. So they do not follow a link that is created
meanwhile. Only the path of the root itself may contain links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def opened(root: str, relative: str, *, make: bool = False) -> Iterator[int]:
    """Opens a descriptor of a folder below `root`. Raises OSError with the first part of the path that is a link
    or does not exist."""
    if make:
        os.makedirs(root, exist_ok=True)
    here, path = os.open(root, _FOLDER), root
    try:
        for part in [part for part in relative.split("/") if part]:
            path = f"{path}/{part}"
            if part == "..":
                raise OSError(errno.EINVAL, "it leads out of its folder", path)
            try:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=here)
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            except OSError as error:
                if is_link(here, part):
                    raise OSError(
                        errno.ELOOP, "it is a link, which is not followed", path
                    ) from None
                raise OSError(error.errno, error.strerror, path) from None
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def is_link(folder: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode)
    return False


def listed(root: str, relative: str) -> tuple[list[str], list[str]]:
    """Lists the files and the links under a folder, relative to `root` and sorted."""
    files: list[str] = []
    links: list[str] = []
    waiting = [relative]
    while waiting:
        at = waiting.pop()
        try:
            with opened(root, at) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        kind = links
                    elif entry.is_dir(follow_symlinks=False):
                        kind = waiting
                    else:
                        kind = files
                    kind.append(f"{at}/{entry.name}")
        except FileNotFoundError:  # it was removed just now, or was never there
            continue
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            links.append(os.path.relpath(error.filename, root))
    return sorted(files), sorted(set(links))


def remove(root: str, relative: str) -> None:
    """Removes a file, a folder with its content, or a link itself, if it exists."""
    above, _, name = relative.rpartition("/")
    with contextlib.suppress(FileNotFoundError), opened(root, above) as folder:
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def remove_if_empty(root: str, relative: str) -> bool:
    """Removes a folder if it is empty. Returns whether it did."""
    above, _, name = relative.rpartition("/")
    try:
        with opened(root, above) as folder:
            os.rmdir(name, dir_fd=folder)
    except OSError:
        return False
    return True


def replace(root: str, relative: str, content: bytes) -> None:
    """Writes a file so that readers see all of it or nothing. Writes a draft with a random unused name first.

    Replaces a link in the file's place, and does not follow it."""
    above, _, name = relative.rpartition("/")
    draft = f"{name}.{uuid.uuid4().hex}.draft"
    with opened(root, above, make=True) as folder:
        made = os.open(
            draft,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o666,
            dir_fd=folder,
        )
        try:
            with open(made, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise
