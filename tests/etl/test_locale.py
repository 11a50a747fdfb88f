"""What programs print and refuse in a locale that is not UTF-8."""

import os
import subprocess
import sys

import pytest

LATIN = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
UTF8 = {**os.environ, "PYTHONUTF8": "1"}


@pytest.mark.parametrize(
    ("name", "environment", "is_accepted"),
    [
        (b"plain", LATIN, True),
        ("né".encode(), LATIN, False),
        ("né".encode(), UTF8, True),
        (b"n\xe9", UTF8, False),
    ],
)
def test_a_guessed_spec_is_utf8_and_a_name_that_is_not_is_refused(
    tmp_path, repo, name, environment, is_accepted
):
    file = os.path.join(os.fsencode(tmp_path), name + b".csv")
    with open(file, "wb") as rows:
        rows.write("a,né,click\n1,é,0\n2,x,1\n3,…,0\n".encode())
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "guess", file],
        capture_output=True,
        env=environment,
        cwd=repo,
        check=False,
    )
    printed, said = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in said
    if is_accepted:
        assert done.returncode == 0
        assert 'name = "né"' in printed
    else:
        assert (done.returncode, printed) == (2, "")
        assert "this name is not UTF-8" in said
        assert "set PYTHONUTF8=1" in said
