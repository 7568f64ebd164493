from dataclasses import replace

from gradveil.config import TrainSettings
from gradveil.reproduce.base import Lab
from gradveil.reproduce.trainings import trained


def test_a_training_runs_once_and_a_diverging_one_gives_its_reason(tmp_path):
    told = []
    settings = TrainSettings(dataset="mnist-5k", model="logistic", clients=10, sampled=1, rounds=2, eval_every=2)
    first = trained(Lab(tmp_path), settings, told.append)
    assert trained(Lab(tmp_path), settings, told.append) == first
    assert told == [0.5, 1.0]
    assert first.last("accuracy") > 0.5
    lost = trained(Lab(tmp_path), replace(settings, model="mlp", lr=1e20), told.append)
    assert lost.why
    assert lost.last("accuracy") is None
