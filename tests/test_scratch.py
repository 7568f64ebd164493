"""A scratch folder is offered within a block, and nowhere else."""

from gradveil.scratch import scratch_file, scratch_in


def test_the_innermost_offer_counts(tmp_path):
    assert scratch_file("x") is None
    with scratch_in(tmp_path):
        assert scratch_file("x") == tmp_path / "x"
        with scratch_in(None):
            assert scratch_file("x") is None
        assert scratch_file("x") == tmp_path / "x"
    assert scratch_file("x") is None
