"""Rows that do not parse, without Spark: the folder that they are written to."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable

import pyarrow.fs as pafs

from sluice.etl.apply.rejected import Reject
from sluice.etl.common.errors import InputError
from sluice.etl.local.places import store_of

_OURS = re.compile(r"\.?(part-[^/]*\.json|_SUCCESS)(\.crc)?")


def check_folder(url: str) -> None:
    """Refuses a folder that holds anything but the rejects of an earlier job: its content is going to be replaced."""
    for info in _there(url):
        name = os.path.basename(info.path)
        if info.type != pafs.FileType.File or not _OURS.fullmatch(name):
            raise InputError(f"--rejects {url}: holds {name!r}, which no job set aside and which would be removed; "
                             "name another folder")


def write_folder(url: str, rejects: Iterable[Reject]) -> None:
    """Replaces a folder's content."""
    check_folder(url)
    fs, folder, _ = store_of(url)
    for info in _there(url):
        fs.delete_file(info.path)
    fs.create_dir(folder, recursive=True)
    with fs.open_output_stream(f"{folder}/part-00000.json") as sink:
        for reject in rejects:
            sink.write(f"{reject.to_json()}\n".encode())


def first_of(url: str, reason: str) -> Reject | None:
    """The first row that was set aside for a reason."""
    fs, folder, _ = store_of(url)
    with fs.open_input_stream(f"{folder}/part-00000.json") as stream:
        held = b""
        while chunk := stream.read(1 << 20):
            *lines, held = (held + chunk).split(b"\n")
            for found in map(json.loads, lines):
                if found["reason"] == reason:
                    return Reject(found.get("file", ""), found.get("line"), reason, found["raw"], found.get("base64"))
    return None


def _there(url: str) -> list[pafs.FileInfo]:
    fs, folder, _ = store_of(url)
    found: list[pafs.FileInfo] = fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    return found
