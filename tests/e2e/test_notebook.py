"""examples/tuned_loop.ipynb: its cells run one after another in any folder, without Jupyter."""

import json
import tempfile

import pytest
import torch


@pytest.mark.slow
def test_its_cells_run_from_any_folder_and_show_what_the_agent_did(
    repo, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cells = json.loads((repo / "examples" / "tuned_loop.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "SECONDS = 15\n" in "".join(sources)
    names, threads = {"__name__": "__main__"}, torch.get_num_threads()
    for source in sources:
        exec(compile(source.replace("SECONDS = 15\n", "SECONDS = 6\n"), "cell", "exec"), names)
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert out.count(" rows/s") >= 2
    assert "auto: " in out
    assert "at fetch=" in out
    (folder,) = tmp_path.glob("sluice-notebook-*")
    assert (folder / "run" / "report.html").is_file()
