"""The plainest server of a run's model: the standard library's HTTP server, a thread a connection, one request a pass.

    python benchmarks/plain_server.py RUN

Features and model are the run's own, with float32 tables, as somebody would write it who has them in a Python process:
no batching, no limits. `benchmarks/serving.py --beside` runs it in turns with Sluice's.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from sluice.dlrm.serving.scorer import Answer, Scorer
from sluice.dlrm.serving.served_model import Servable
from sluice.dlrm.telemetry.silence_warnings import quiet


def main(run: str) -> None:
    quiet()
    torch.set_num_threads(1)
    scorer = Scorer(Servable.load(Path(run)), most_rows=4096)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body leave together
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            (answer,) = scorer.answer([body])
            good = isinstance(answer, Answer)
            content = json.dumps(
                answer._asdict() if isinstance(answer, Answer) else {"error": str(answer)}
            ).encode()
            self.send_response(200 if good else 400)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    print(f"serving {run} on http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
