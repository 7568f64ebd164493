import resource
import signal

import numpy as np
import pytest

from gradveil.engines.shared_file import SharedFile


def test_arrays_come_back_and_a_writable_one_is_shared():
    arrays = {"images": np.arange(30, dtype=np.uint8).reshape(2, 15), "none": np.zeros((0, 3)), "v": np.zeros(5)}
    shared = SharedFile(arrays)
    for name, array in arrays.items():
        found = shared.array(name)
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
    shared.array("v", writable=True)[2] = 4.0
    assert shared.array("v")[2] == 4.0
    with pytest.raises(ValueError, match="read-only"):
        shared.array("images")[0, 0] = 1
    shared.close()


def test_a_file_that_does_not_fit_is_closed_and_says_so():
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            SharedFile({"v": np.zeros(5000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
