"""Messages can be made in the process of a test."""

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True)
def _a_task(monkeypatch):
    """Set the task that Flower expects of a process that makes messages."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
