"""`mox.file`: files on local paths and `s3://`, with one set of functions."""

from __future__ import annotations

from plait.data.copying import copy, copy_parallel, rename
from plait.data.files import (
    File,
    append,
    exists,
    get_size,
    glob,
    is_directory,
    list_directory,
    make_dirs,
    mk_dir,
    read,
    remove,
    scan_dir,
    set_auth,
    stat,
    walk,
    write,
)

__all__ = [
    "File",
    "append",
    "copy",
    "copy_parallel",
    "exists",
    "get_size",
    "glob",
    "is_directory",
    "list_directory",
    "make_dirs",
    "mk_dir",
    "read",
    "remove",
    "rename",
    "scan_dir",
    "set_auth",
    "stat",
    "walk",
    "write",
]
