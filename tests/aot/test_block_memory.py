"""The XLA mixers keep their pools in place and their temporaries small in cases the flagship programs do not have.

One row alone (XLA then reads pages by slices), few heads with many rows (tensor parallelism),
and a float32 cache under bfloat16 activations each made XLA copy the whole page pool once.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]
MIB = 1 << 20


# Temporaries measured with libtpu 0.0.52: 1, 170, 134 and 89 MiB. A copy of the smallest large pool is 640.
@pytest.mark.parametrize(
    ("case", "limit_mib"), [("one_row", 16), ("mixed_few_heads", 250), ("wide_cache", 200), ("window_sinks", 150)]
)
def test_pools_are_not_copied(case: str, limit_mib: int) -> None:
    worker = Path(__file__).with_name("block_memory.py")
    done = subprocess.run([sys.executable, str(worker), case], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["alias"] >= sum(found["pools"])
    assert found["temp"] <= limit_mib * MIB
