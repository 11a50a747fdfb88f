"""The command of docs/launch.md that starts a server."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from sluice.common.settings import parse
from sluice.dlrm.serving.server import ServerOptions

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "launch.md").read_text()


def test_the_server_of_a_pod_is_started_with_words_that_a_wheel_has():
    (command,) = re.findall(r"^ *command: (\[.*serve, .*\])$", PAGE, re.M)
    words = yaml.safe_load(command)
    assert words[:2] == ["sluice", "serve"]
    assert parse(ServerOptions, argv=words[2:], prog="sluice serve").port == 8000
