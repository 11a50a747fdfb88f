"""A store on 127.0.0.1 that speaks S3 and is as slow as a far one: `FarStore`. It only reads, and checks no signature.

A request takes 50 ms, and each sends 20 MB/s.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, unquote

LATENCY_S, BYTES_PER_S = 0.05, 20e6
KEYS = {
    "AWS_ACCESS_KEY_ID": "race",
    "AWS_SECRET_ACCESS_KEY": "race",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = Path()

    def do_GET(self) -> None:
        name, _, query = self.path.partition("?")
        path, asked = self.folder / unquote(name).strip("/"), dict(parse_qsl(query))
        if "list-type" in asked:
            self._list(path, asked.get("prefix", ""))
            return
        if not path.is_file():
            time.sleep(LATENCY_S)
            self._answer(404, {"Content-Length": "0"})
            return
        size = path.stat().st_size
        start, stop = 0, size
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(part[1]), min(size, int(part[2] or size) + 1)
        length = stop - start if self.command == "GET" else 0
        time.sleep(LATENCY_S + length / BYTES_PER_S)
        self._answer(
            206 if part else 200,
            {
                "Content-Length": str(stop - start),
                "Content-Range": f"bytes {start}-{stop - 1}/{size}",
                "Last-Modified": self.date_time_string(path.stat().st_mtime),
                "ETag": f'"{size:x}"',
            },
        )
        if length:
            with open(path, "rb") as file:
                self.connection.sendfile(file, start, length)

    do_HEAD = do_GET

    def _list(self, bucket: Path, prefix: str) -> None:
        time.sleep(LATENCY_S)
        files = [path for path in sorted(bucket.rglob("*")) if path.is_file()]
        keys = [
            f"<Contents><Key>{key}</Key><Size>{path.stat().st_size}</Size><ETag>1</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for path in files
            if (key := str(path.relative_to(bucket))).startswith(prefix)
        ]
        text = (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(keys)}</ListBucketResult>"
        )
        self._answer(200, {"Content-Length": str(len(text)), "Content-Type": "application/xml"})
        self.wfile.write(text.encode())

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Prints no line per request."""


class FarStore:
    """The files of a folder in a process of its own; the address is HOST:PORT."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = f"127.0.0.1:{self._process.stdout.readline().strip()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends with its input, also if this process is killed


def main(folder: str) -> None:
    _Handler.folder = Path(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
