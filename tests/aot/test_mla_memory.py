"""The XLA latent attention keeps its pool in place and its temporaries small at full size.

With rows of 576 values XLA copied the whole pool to write a step's rows; padded to 640 it does not.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]
MIB = 1 << 20


# Temporaries measured with libtpu 0.0.52: 82, 402, 24 and 1 MiB. A copy of the smallest pool is 1280.
@pytest.mark.parametrize(
    ("case", "limit_mib"), [("decode", 120), ("mixed", 500), ("mixed_few_heads", 60), ("one_row", 16)]
)
def test_pool_is_not_copied(case: str, limit_mib: int) -> None:
    worker = Path(__file__).with_name("mla_memory.py")
    done = subprocess.run([sys.executable, str(worker), case], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["alias"] >= found["pool"]
    assert found["temp"] <= limit_mib * MIB
