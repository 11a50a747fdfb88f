"""The example without our ETL, run as a person runs it, on fewer rows."""

import re
from importlib.util import module_from_spec, spec_from_file_location

import pytest

pytestmark = pytest.mark.slow


def test_a_plain_model_learns_from_plain_parquet(repo, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor")
    )  # an optimiser makes one
    spec = spec_from_file_location("plain_torch", repo / "examples" / "plain_torch.py")
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    example.make_files(tmp_path)
    for number in (1, 2, 3):
        (tmp_path / f"part-{number}.parquet").unlink()
    example.main(str(tmp_path / "*.parquet"))
    told = capsys.readouterr()
    losses = [
        float(loss) for loss in re.findall(r"epoch \d: mean loss (0\.\d+) over 9 steps", told.out)
    ]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert re.search(r"^(input-bound|balanced|consumer-bound): .*\d+%", told.out, re.MULTILINE)
    assert "label: clicked; dense: liking; sparse: user; id_list: seen" in told.err
