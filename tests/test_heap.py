import subprocess
import sys

import pytest

CODE = """
import resource, sys
import torch
from gradveil.heap import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(15): torch.ones(2**23)
before = faults()
for _ in range(20): torch.ones(2**23)
print(faults() - before, kept)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's mallopt")
def test_memory_that_is_freed_is_not_mapped_again():
    def page_faults(mode):
        command = [sys.executable, "-c", CODE, mode]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        return ended.stdout.split()

    usual, kept = page_faults("usual"), page_faults("keep")
    assert kept[1] == "True"
    assert int(kept[0]) < int(usual[0]) / 10
