import pytest

from gradveil.errors import ThreatModelError
from gradveil.threat import Knowledge, ThreatModel


def test_unknown_knowledge_is_refused():
    with pytest.raises(ThreatModelError, match="colours"):
        ThreatModel.of("colours")


def test_every_kind_of_knowledge_can_be_granted_by_its_name():
    everything = ThreatModel.of(*(knowledge.value for knowledge in Knowledge))
    assert everything.knows == frozenset(Knowledge)
    assert everything.names == sorted(knowledge.value for knowledge in Knowledge)
    assert ThreatModel().names == []
