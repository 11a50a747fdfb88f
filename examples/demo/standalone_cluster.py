"""`StandaloneCluster`: a Spark cluster of a master and workers on this machine, from the pyspark wheel."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

# Runs a command, and kills it with all its children when the standard input is closed. That also happens when our
# process ends, for any reason.
_UNTIL_CLOSED = '("$@"; echo "$0"; kill -KILL 0) & read -r _; kill -KILL 0'
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""What is short-lived is compiled quickly rather than well."""
_ENDED = "it has ended by itself"
_LOCAL = "local"
"""The folder for the executors' temporary files."""


class StandaloneCluster:
    """A master, and workers that `add_worker` starts. All listen on 127.0.0.1 only. They end with the `with` block, and
    with this process."""

    def __init__(self, place: Path) -> None:
        import pyspark

        self.place = place
        self._home = Path(pyspark.__file__).parent
        self._started: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"spark://127.0.0.1:{self._port}"

    def __enter__(self) -> StandaloneCluster:
        try:
            self._start("master.Master", "--port", str(self._port), until="ALIVE")
        except BaseException:
            self.close()
            raise
        return self

    def add_worker(self, *, memory: str = "1g") -> Path:
        """Starts a worker with one core, and returns the path of its log."""
        folder = self.place / f"worker-{len(self._started)}"
        return self._start(
            "worker.Worker",
            *f"--cores 1 --memory {memory} --work-dir".split(),
            str(folder),
            self.url,
            until="Successfully registered",
        )

    def _start(self, name: str, *words: str, until: str) -> Path:
        env = {
            "SPARK_HOME": str(self._home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
            "SPARK_LOCAL_DIRS": str(self.place / _LOCAL),
        }
        env |= {key: os.environ[key] for key in ("PATH", "JAVA_HOME") if key in os.environ}
        log = self.place / f"{len(self._started)}-{name}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [
                    "sh",
                    "-c",
                    _UNTIL_CLOSED,
                    _ENDED,
                    self._home / "bin/spark-class",
                    f"org.apache.spark.deploy.{name}",
                    *["--host", "127.0.0.1", "--webui-port", "0"],
                    *words,
                ],
                env=env,
                cwd=self.place,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._started.append(process)
        with subprocess.Popen(
            ["tail", "-n", "+1", "-s", "0.1", "-F", log],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as lines:
            assert lines.stdout is not None
            last = next(line for line in lines.stdout if until in line or _ENDED in line)
            lines.kill()
        if until not in last:
            raise RuntimeError(
                f"{name} ended before it said {until!r}; it said: {log.read_text()[-500:]}"
            )
        return log

    def close(self) -> None:
        for process in reversed(self._started):
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        self._started.clear()
        shutil.rmtree(self.place / _LOCAL, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.close()
