"""The examples of docs/python-api.md run as they stand."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["audit", "train-attack-score"])
def test_the_example_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})  # noqa: S102 - our own documentation
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert list(tmp_path.glob("runs/*/rows.jsonl"))
