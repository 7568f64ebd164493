import ast

import pytest

from gradveil.reproduce import provenance
from gradveil.reproduce.provenance import as_one, data_digests, source_digests

SOTERIA = source_digests("gradveil.reproduce.soteria")


@pytest.mark.parametrize("path", ["reproduce/soteria.py", "attacks/gs.py", "defences/laplace.py", "models/lenet.py"])
def test_files_that_an_experiment_imports_or_names_count(path):
    assert path in SOTERIA


@pytest.mark.parametrize("path", ["reproduce/base.py", "reproduce/loda.py", "cli/runs.py", "reproduce/pages.py"])
def test_files_that_write_results_down_or_are_not_used_do_not_count(path):
    assert path not in SOTERIA


@pytest.mark.parametrize(
    ("code", "same"),
    [
        ("def f(x):\n    return x + 1  # comment", True),
        ('def f(x):\n    """Say what."""\n    return (x + 1)', True),
        ("def f(x):\n    return x + 2", False),
        ("def f(x, y):\n    return x + 1", False),
        ("def f(x):\n    return x - 1", False),
        ("def f(x):\n    yield x + 1", False),
    ],
)
def test_comments_and_documentation_do_not_change_a_digest_but_code_does(code, same):
    first = provenance._meaning(ast.parse("def f(x):\n    return x + 1"))
    assert (provenance._meaning(ast.parse(code)) == first) is same


def test_a_text_inside_an_expression_counts():
    one, two = (provenance._meaning(ast.parse(f"x = {text!r}")) for text in ("gs:tv=1", "gs:tv=2"))
    assert one != two


def test_the_data_of_a_paper_are_the_files_of_the_sets_that_it_names(tmp_path):
    for name in ("MNIST/raw/train-images-idx3-ubyte.gz", "cifar-10-batches-bin/data_batch_1.bin", "other.npz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    first = data_digests("gradveil.reproduce.soteria", tmp_path)
    assert set(first) == {"MNIST/raw/train-images-idx3-ubyte.gz", "cifar-10-batches-bin/data_batch_1.bin"}
    (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(b"changed")
    second = data_digests("gradveil.reproduce.soteria", tmp_path)
    assert [name for name in first if first[name] != second[name]] == ["cifar-10-batches-bin/data_batch_1.bin"]


def test_one_digest_of_many_files_depends_on_each_name_and_digest_but_not_on_the_order():
    assert as_one({"a": "1", "b": "2"}) == as_one({"b": "2", "a": "1"})
    assert len({as_one(files) for files in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {})}) == 4
