"""A real S3 protocol server on 127.0.0.1 (moto's), behind a server that can refuse requests."""

import random
import socket
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
LOST = 0
"""The status of a request whose connection ends before an answer."""
_BODIES = {503: "SlowDown", 500: "InternalError", 403: "AccessDenied", 429: "TooManyRequests"}


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        """Prints no line per request."""


class S3Server:
    """`refuse(rate, status)` makes that share of requests of some methods fail, and at most so many; `refused` counts
    them."""

    def __init__(self):
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._door, threaded=True, request_handler=_Quiet
        )
        self._lock = threading.Lock()
        self._chance = random.Random(0)
        self._rate, self._status, self._methods, self._most = 0.0, 503, list[str](), 0.0
        self.refused = self.requests = 0
        self.ranges: list[str] = []
        self.thread = threading.Thread(target=self._server.serve_forever, name="moto", daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def query(self) -> str:
        return f"endpoint_override={self.address}&scheme=http&region=us-east-1"

    def refuse(
        self,
        rate: float,
        status: int = 503,
        methods: str = "GET HEAD",
        most: float = float("inf"),
    ) -> None:
        with self._lock:
            self._rate, self._status, self._methods, self._most = (
                rate,
                status,
                methods.split(),
                most,
            )
            self.refused, self.ranges = 0, []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.thread.join()

    def _door(self, environ, start_response):
        with self._lock:
            self.requests += 1
            refuse = (
                environ["REQUEST_METHOD"] in self._methods
                and self.refused < self._most
                and self._chance.random() < self._rate
            )
            self.refused += refuse
            if "HTTP_RANGE" in environ:
                self.ranges.append(environ["HTTP_RANGE"])
        if not refuse:
            return self._app(environ, start_response)
        if self._status == LOST:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        code = _BODIES[self._status]
        body = f"<Error><Code>{code}</Code><Message>as the test asks for</Message></Error>".encode()
        start_response(
            f"{self._status} {code}",
            [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))],
        )
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]


def with_bucket(server, monkeypatch):
    """The server's file system with a bucket `data`, its keys where every client looks, nothing refused from now on."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    from pyarrow.fs import S3FileSystem

    server.refuse(0)
    files = S3FileSystem(
        endpoint_override=server.address, scheme="http", allow_bucket_creation=True
    )
    files.create_dir("data")
    return files
