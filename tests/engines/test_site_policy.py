"""A site's policy: read strictly from the site's own file, with defaults that give nothing away."""

from dataclasses import replace

import pytest

from gradveil.config import TrainSettings
from gradveil.engines.site_policy import SitePolicy, agree, read_policy
from gradveil.errors import ConfigError, RefusedError

POLICY = SitePolicy(partition_id=0, private_folder="keys", defence="prune")
RUN = TrainSettings(defence="prune")


def test_keys_come_from_the_node_config_and_from_a_file(tmp_path):
    (tmp_path / "site.toml").write_text('defence = "fedkl"\nmax-rate = 0.02\n')
    policy = read_policy({"partition-id": 3, "num-partitions": 9, "policy": str(tmp_path / "site.toml")})
    assert (policy.partition_id, policy.defence, policy.max_rate) == (3, "fedkl", 0.02)


@pytest.mark.parametrize(
    ("node", "text", "message"),
    [
        ({"defence": "prune"}, 'defence = "none"', "each key once, got defence"),
        ({}, "max-rat = 1.0", "no setting 'max_rat'"),
        ({}, "max-rate = -1.0", "max_rate must be more than 0"),
        ({}, "training-scores = 0.0001", "training_scores must be in"),
        ({}, 'tripwire = "of"', "Unknown tripwire"),
        ({}, "max-momentum = 1.0", "max_momentum must be"),
        ({}, "max-batch = 2", "max_batch must be at least 8"),
        ({"partition-id": "one"}, "", "partition_id"),
    ],
)
def test_a_wrong_policy_is_refused(tmp_path, node, text, message):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(RefusedError, match=message) as caught:
        read_policy({**node, "policy": str(tmp_path / "site.toml")})
    assert caught.value.code == "policy"


def test_defaults_give_nothing_away():
    policy = SitePolicy()
    given = (policy.reports, policy.repeatable, policy.training_scores, policy.files, policy.defence)
    assert not any(given)


def test_marks_and_paths_are_the_sites_own():
    run = replace(RUN, sensitive="1.0", aux="/srv/a.npz", weights="/srv/w.safetensors")
    seen = agree(replace(POLICY, sensitive="0/2"), run)
    assert (seen.sensitive, seen.aux, seen.weights) == ("0/2", "", "")
    seen = agree(replace(POLICY, files="/srv/a.npz, /srv/w.safetensors"), run)
    assert (seen.aux, seen.weights) == ("/srv/a.npz", "/srv/w.safetensors")
    assert agree(POLICY, replace(RUN, aux="cifar10")).aux == "cifar10"


@pytest.mark.parametrize(
    ("own", "asked", "played"), [("off", "warn", "warn"), ("refuse", "off", "refuse"), ("warn", "refuse", "refuse")]
)
def test_a_run_can_only_tighten_the_tripwire(own, asked, played):
    assert agree(replace(POLICY, tripwire=own), replace(RUN, tripwire=asked)).tripwire == played


@pytest.mark.parametrize("text", ["prune:fraction=0.9", "none", " none+prune", "Prune"])
def test_the_defence_is_compared_as_text(text):
    with pytest.raises(RefusedError, match="to which this site agreed"):
        agree(POLICY, replace(RUN, defence=text))
    assert agree(POLICY, replace(RUN, defence=" prune ")).defence == " prune "


def test_a_policy_checks_its_numbers():
    with pytest.raises(ConfigError, match="max_epochs must be at least 1"):
        SitePolicy(max_epochs=0)
