"""What only a GPU can run. These wait for one; what leads to them is tested on a CPU (test_sharding, test_ranks)."""

import pytest
import torch

from tests.dlrm.rig import launch
from tests.run_program import last_json

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("kernel", ["fused", "uvm", "uvm_caching"])
def test_each_kernel_trains_as_the_plain_twin_does(tmp_path, kernel):
    """Steps look ahead; on two GPUs or more, tables are cut by rows, and the smallest has a copy on each."""
    process = launch(
        min(2, torch.cuda.device_count()), "tests.dlrm.ranks", tmp_path, kernel, tmp=tmp_path
    )
    assert process.returncode == 0, process.stderr[-3000:]
    differences = last_json(process)[kernel]
    assert differences["losses"] < 1e-4
    assert differences["weights"] < 1e-3
