import dataclasses

import pytest

from gradveil.audits import AuditSettings, make_audit_settings
from gradveil.config import TrainSettings, read_settings
from gradveil.errors import ConfigError, ThreatModelError, UnknownNameError


def test_none_always_comes_first_and_each_component_once():
    settings = make_audit_settings({"defences": "prune:fraction=0.7,gaussian:std=0.1,prune:fraction=0.7,none,prune"})
    assert settings.defences == ("none", "prune:fraction=0.7", "gaussian:std=0.1")  # as they were written first
    assert make_audit_settings({"defences": "none"}).defences == ("none",)
    assert make_audit_settings({"attacks": "gs,dlg:iterations=3,gs"}).attacks == ("gs", "dlg:iterations=3")


@pytest.mark.parametrize("kind", ["defences", "attacks"])
@pytest.mark.parametrize("empty", ["", ",", []])
def test_an_empty_list_is_refused(kind, empty):
    with pytest.raises(ConfigError, match=f"{kind} must name at least one, got an empty list"):
        make_audit_settings({kind: empty})


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"defences": "prunee"}, UnknownNameError, "Did you mean 'prune'"),
        ({"defences": "prune:fractio=1"}, UnknownNameError, "Did you mean 'fraction'"),
        ({"attacks": "gss"}, UnknownNameError, "Did you mean 'gs'"),
        ({"knows": "label"}, ThreatModelError, "Unknown knowledge 'label'. Did you mean 'labels'?"),
        ({"knows": "labels,defence"}, ConfigError, "--adaptive"),
        ({"targets": 0}, ConfigError, r"targets must be in \[1, 100000\], got 0\. Change --targets\.$"),
        ({"clients": 0}, ConfigError, r"clients must be at least 1, got 0\. Change --clients\.$"),
        ({"defences": "gaussian:std=0"}, ConfigError, r"std must be more than 0, got 0\.0\. Set gaussian:std=\.\.\.$"),
        ({"images": 0}, ConfigError, "images must be"),
        ({"looks": 0}, ConfigError, "looks must be"),
        ({"seeds": 0}, ConfigError, "seeds must be"),
        ({"update": "local"}, ConfigError, "update is a setting of audits before --protocol.*--protocol fedavg"),
        ({"algorithm": "fedsgd"}, ConfigError, "algorithm is a setting of audits before --protocol.*--protocol lab"),
        ({"protocol": "labs"}, ConfigError, "protocol"),
        ({"tap": "1/9", "rounds": 8}, ConfigError, r"tap must name rounds of the training \(1 to 8\), got 9.*--rounds"),
        ({"tap": "0"}, ConfigError, "tap must name rounds"),
        ({"tap": "2/2"}, ConfigError, "tap must name each round once"),
        ({"rounds": -1}, ConfigError, "rounds must be"),
        ({"lr": "fast"}, ConfigError, "lr"),
        ({"target": 3}, UnknownNameError, "Did you mean 'targets'"),
    ],
)
def test_bad_settings(change, error, text):
    with pytest.raises(error, match=text):
        make_audit_settings(change)


def test_a_toml_file_holds_lists_and_tables(tmp_path):
    path = tmp_path / "audit.toml"
    path.write_text(
        'targets = 4\nadaptive = true\nattacks = ["gs:iterations=10"]\nknows = ["num-examples"]\n'
        '[[defences]]\nname = "prune"\nfraction = 0.9\n[[defences]]\nname = "gaussian"\nrelative = true\n'
    )
    settings = make_audit_settings(read_settings(path))
    assert settings.defences == ("none", "prune:fraction=0.9", "gaussian:relative=true")
    assert (settings.attacks, settings.knows) == (("gs:iterations=10",), ("num-examples",))
    assert (settings.targets, settings.adaptive) == (4, True)


def test_the_training_has_the_same_settings():
    settings = AuditSettings(lr=0.3, clients=7, partition="by-class", seed=5, rounds=4, protocol="fedavg")
    same = TrainSettings(
        model="lenet-dlg", lr=0.3, clients=7, partition="by-class", rounds=4, sensitive="0.1", defence="prune", seed=6
    )
    assert settings.training("prune", 6) == same
    lab = dataclasses.replace(settings, protocol="lab", images=3).training("prune", 6)
    assert lab == dataclasses.replace(same, algorithm="fedsgd", batch_size=3, weighting="uniform")


def test_each_protocol_has_its_own_number_of_rounds_and_taps():
    assert make_audit_settings({}).rounds == 500
    assert make_audit_settings({"protocol": "fedavg"}).rounds == 20
    assert make_audit_settings({"protocol": "fedavg", "rounds": 7}).rounds == 7
    assert make_audit_settings({"rounds": 9}).taps == (1, 4, 9)
    assert make_audit_settings({"rounds": 9, "tap": "2/5"}).taps == (2, 5)
    assert make_audit_settings({"rounds": 0}).taps == (1,)


def test_seeds_count_up_from_the_first():
    assert list(AuditSettings(seed=3, seeds=2).all_seeds) == [3, 4]
