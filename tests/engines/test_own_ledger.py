"""A site's policy and ledger in somebody's own app: what they count, what they refuse, over all runs."""

import pytest
import torch

from gradveil.config import TrainSettings
from gradveil.defences import build_defence
from gradveil.engines.flower_protect import protect
from gradveil.engines.flower_train import train
from gradveil.engines.site_budget import epsilon_in_all
from gradveil.engines.site_history import read_history
from gradveil.errors import ConfigError, RefusedError
from gradveil.federated.protocol import Protocol
from gradveil.models import create_model
from tests.engines.flower_apps import OwnGrid, _a_task, app_that_adds, asked  # noqa: F401 - a fixture

START = {"w": torch.tensor([1.0, 2.0])}
SPEC = "dp-sgd:noise=4.0"
IMAGES = (torch.rand(16, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4)


def write_policy(site, *lines):
    site.mkdir(exist_ok=True)
    (site / "policy.toml").write_text("\n".join(lines) + "\n")


def play(site, folder, number, defence=SPEC, **options):
    network = create_model("logistic", (1, 6, 6), 4, seed=0)
    return train(
        network, IMAGES, defence, lr=0.1, batch_size=8, round_number=number, folder=folder, site=site, **options
    )


def test_the_epsilon_of_all_runs_is_that_of_their_updates_by_hand(tmp_path):
    write_policy(tmp_path / "site", f'defence = "{SPEC}"', "max-delta = 1e-3")
    for run, number in (("a", 1), ("a", 2), ("b", 1)):
        play(tmp_path / "site", tmp_path / run, number)
    lines = read_history(tmp_path / "site" / "history-0.jsonl")
    how = Protocol.of(TrainSettings(batch_size=8, momentum=0.0)).local
    one, two = (build_defence(SPEC).budget(how.releases(16, updates)) for updates in (1, 2))
    wanted = [epsilon_in_all(costs, 1e-3) for costs in ([one], [two], [two, one])]
    assert [line.total for line in lines] == pytest.approx(wanted)
    assert [line.round for line in lines] == [1, 2, 1]
    assert (tmp_path / "site" / "ledger-0.json").stat().st_mode & 0o777 == 0o600


def test_updates_beyond_the_policy_are_refused_whatever_the_run(tmp_path):
    site = tmp_path / "site"
    write_policy(site, f'defence = "{SPEC}"', "max-rounds = 2")
    play(site, tmp_path / "a", 1, rounds=2)
    play(site, tmp_path / "b", 1, rounds=2)
    with pytest.raises(RefusedError, match="2 updates in all"):
        play(site, tmp_path / "c", 1, rounds=2)
    with pytest.raises(RefusedError, match="Rounds must increase"):
        play(site, tmp_path / "b", 1, rounds=2)
    assert len(read_history(site / "history-0.jsonl")) == 2
    spent = read_history(site / "history-0.jsonl")[0].epsilon
    write_policy(site, f'defence = "{SPEC}"', f"max-epsilon = {1.5 * spent}", "max-delta = 0.01")
    with pytest.raises(RefusedError, match="max-epsilon"):
        play(site, tmp_path / "d", 1)


@pytest.mark.parametrize(
    ("line", "options", "reason"),
    [
        ('defence = "none"', {}, "to which this site agreed"),
        ("max-rate = 0.01", {}, "above max-rate"),
        ("max-epochs = 1", {"epochs": 2}, "above max-epochs"),
        ("colour = 1", {}, "colour"),
    ],
)
def test_another_training_than_agreed_is_refused_and_costs_nothing(line, options, reason, tmp_path):
    agreed = [] if line.startswith("defence") else [f'defence = "{SPEC}"']
    write_policy(tmp_path / "site", *agreed, line)
    with pytest.raises(RefusedError, match=reason):
        play(tmp_path / "site", tmp_path / "a", 1, **options)
    assert not (tmp_path / "site" / "ledger-0.json").exists()


def test_a_ledger_needs_a_policy_and_the_folder_of_the_run(tmp_path):
    with pytest.raises(RefusedError, match=r"policy\.toml"):
        play(tmp_path, tmp_path / "a", 1)
    with pytest.raises(ConfigError, match="folder"):
        play(tmp_path, None, 1)


def replies(site, rounds, **node):
    grid = OwnGrid(app_that_adds({"w": torch.ones(2)}, [protect("prune", site=site)]), **node)
    return [grid.answer(asked(START)) for _ in range(rounds)]


def test_a_mod_counts_its_updates_and_sends_none_beyond_the_policy(tmp_path):
    write_policy(tmp_path, 'defence = "prune"', "max-rounds = 2")
    assert [reply.has_error() for reply in replies(tmp_path, 3)] == [False, False, True]
    assert [line.epsilon for line in read_history(tmp_path / "history-0.jsonl")] == [None, None]


@pytest.mark.parametrize("lines", [('defence = "prune"', "max-epsilon = 100.0"), ('defence = "gaussian"',), ()])
def test_a_mod_sends_nothing_that_the_site_did_not_agree_to(lines, tmp_path):
    write_policy(tmp_path, *lines)
    (reply,) = replies(tmp_path, 1)
    assert reply.has_error()
    assert not (tmp_path / "history-0.jsonl").exists()
