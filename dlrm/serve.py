"""Serves a run's newest checkpoint over HTTP: raw features in, probabilities out, with the spec and the fitted state
that the model was trained with.

    sluice serve run --port 8000
    curl -s http://127.0.0.1:8000/predict -H 'content-type: application/json' \\
        -d '{"rows": [{"I1": 3, "C1": "68fd1e64"}]}'

POST /predict takes {"rows": [{feature: value, …}, …]}. A feature that is not named is missing, as an empty cell is in
training: the spec's default stands there, and it is counted. An empty text is a text, as "" is in CSV; only where
training read TSV, which writes both alike, it is missing. JSON is UTF-8, each key of an object comes once, and no body
is compressed.
GET /model says which features there are, /health whether the server is well, /metrics is for Prometheus. A newer
checkpoint takes over as soon as it is whole. At SIGTERM, the server answers the requests that have come, and ends.

The last line of standard output is one JSON object: requests by status, rows, models taken over. A port of 0 finds a
free one; the line that begins with "serving" names it.
"""

from __future__ import annotations

import socket
from typing import Any, NoReturn

from sluice.common.errors import UsageError
from sluice.common.program import run
from sluice.common.settings import parse
from sluice.dlrm.serving.options import ServerOptions


def main(argv: list[str]) -> dict[str, Any]:
    options = parse(ServerOptions, argv, "sluice serve", description=__doc__)
    # The port is opened before the model is loaded, so that a wrong port is reported at once.
    with listen(options.host, options.port) as listener:
        from sluice.dlrm.serving.server import serve

        return serve(options, listener)


def listen(host: str, port: int) -> socket.socket:
    """Opens a port. Its connections send small answers at once."""
    is_ipv6 = ":" in host
    try:
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            backlog=1024,
            dualstack_ipv6=is_ipv6,
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{host}:{port} cannot be listened on: {error}; choose another --port, or 0 for any that is free"
        ) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main)


if __name__ == "__main__":
    program()
