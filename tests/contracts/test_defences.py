"""Laws that every defence must keep."""

import copy
import dataclasses
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gradveil.defences
from gradveil.defences import HOOKS, Arrived, Client, Defence, Server, build_defence
from gradveil.engines.simulation import Simulation
from gradveil.registry import components
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update

DEFENCES = list(components("defences"))
QUICK = {"dcs2": build_defence("dcs2:steps=2")}
"""Settings for a training that takes little time."""
TESTS = Path(__file__).parents[1] / "defences"
NO_HOOKS = (
    "adaptive",
    "budget",
    "certificate",
    "check",
    "check_images",
    "check_training",
    "overrides",
    "planned",
    "require_pixels",
    "sends",
    "training",
    "tuned",
)


def make_model():
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(),
        nn.Linear(16, 3),
    )  # fmt: skip
    return model.eval()


def make_batch(count=4):
    rng = torch.Generator().manual_seed(1)
    images = torch.rand(count, 1, 8, 8, generator=rng)
    return Batch(images, torch.randint(0, 3, (count,), generator=rng), torch.arange(count) % 2 == 0)


def tensors_like(model, make=torch.randn_like):
    torch.manual_seed(4)
    return {name: make(parameter.detach()) for name, parameter in model.named_parameters()}


def make_client(defence, seed=0):
    model = defence.on_model(make_model(), SecretStream(seed))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    early = defence.early_clients(4)
    server = Server(1, model, {}, {}, torch.Generator().manual_seed(seed))
    public = defence.public({c: Update(tensors_like(model), 4) for c in early}, server)
    client = max(set(range(4)) - set(early))
    rng = SecretStream(seed)
    return Client(client, 1, model, start, make_batch(), public, {}, rng, aux=make_batch(6))


def protect(defence, tensors, client):
    """Return what reaches the aggregation of an update, after on_update and on_server."""
    sent = defence.on_update(Update(tensors, 4), client)
    server = Server(1, client.model, client.public, {}, torch.Generator().manual_seed(0))
    return sent, defence.on_server(sent, server)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def shared(defence, client):
    return {k: v for k, v in tensors_like(client.model).items() if not defence.private(k)}


@pytest.mark.parametrize("name", DEFENCES)
class TestEveryDefence:
    def test_builds_from_defaults_and_from_its_own_text(self, name):
        defence = build_defence(name)
        assert isinstance(defence, Defence)
        assert build_defence(defence.spec) == defence

    def test_an_update_keeps_names_shapes_and_types_to_the_aggregation(self, name):
        defence = build_defence(name)
        client = make_client(defence)
        tensors = shared(defence, client)
        _, received = protect(defence, tensors, client)
        assert {k: (v.shape, v.dtype) for k, v in received.tensors.items()} == {
            k: (v.shape, v.dtype) for k, v in tensors.items()
        }
        assert received.num_examples == 4

    def test_says_in_which_form_it_sends_an_update(self, name):
        defence = build_defence(name)
        client = make_client(defence)
        tensors = shared(defence, client)
        sent, _ = protect(defence, tensors, client)
        form = defence.sends(Update(tensors, 4))
        assert form is not None
        assert {k: (v.shape, v.dtype) for k, v in sent.tensors.items()} == {
            k: (v.shape, v.dtype) for k, v in form.tensors.items()
        }

    def test_a_gradient_keeps_names_shapes_and_types(self, name):
        defence = build_defence(name)
        client = make_client(defence)
        gradient = tensors_like(client.model)
        result = defence.on_gradient(gradient, make_batch(), client)
        assert {k: (v.shape, v.dtype) for k, v in result.items()} == {
            k: (v.shape, v.dtype) for k, v in gradient.items()
        }

    @pytest.mark.parametrize(
        "odd", [torch.tensor(2.0), torch.zeros(0), torch.ones(3).half()], ids=["0-d", "empty", "half"]
    )
    def test_unusual_tensors_pass(self, name, odd):
        defence = build_defence(name)
        client = make_client(defence)
        tensors = {**shared(defence, client), "odd": odd}
        sent, _ = protect(defence, tensors, client)
        if "odd" in sent.tensors:
            assert (sent.tensors["odd"].shape, sent.tensors["odd"].dtype) == (odd.shape, odd.dtype)

    def test_a_scalar_is_treated_as_a_vector_of_one(self, name):
        defence = build_defence(name)
        results = []
        for shape in ((), (1,)):
            client = make_client(defence)
            sent, _ = protect(defence, {**shared(defence, client), "odd": torch.full(shape, 2.0)}, client)
            results.append(sent.tensors["odd"].reshape(-1) if "odd" in sent.tensors else torch.zeros(1))
        assert torch.equal(*results)

    def test_does_not_edit_its_input(self, name):
        defence = build_defence(name)
        client = make_client(defence)
        tensors, batch = shared(defence, client), make_batch()
        kept = copy.deepcopy((tensors, batch, client.model.state_dict(), dict(client.public)))
        defence.on_gradient(tensors_like(client.model), batch, client)
        defence.on_batch(batch, client)
        defence.on_data(batch, client)
        protect(defence, tensors, client)
        assert same(kept[0], tensors)
        assert same(vars(kept[1]), vars(batch))
        assert same(kept[2], client.model.state_dict())
        assert same(kept[3], dict(client.public))

    def test_same_seed_same_result_and_the_global_generator_is_untouched(self, name):
        defence = build_defence(name)
        results = []
        for seed in (11, 12):
            client = make_client(defence)
            tensors = shared(defence, client)
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            batch = defence.on_batch(defence.on_data(make_batch(), client), client)
            gradient = defence.on_gradient({k: v * 2 for k, v in tensors.items()}, make_batch(), client)
            sent, received = protect(defence, tensors, client)
            assert torch.equal(before, torch.get_rng_state())
            results.append((vars(batch), gradient, sent.tensors, received.tensors))
        assert all(same(one, other) for one, other in zip(*results, strict=True))

    def test_a_zero_update_stays_finite(self, name):
        defence = build_defence(name)
        client = make_client(defence)
        zeros = {k: torch.zeros_like(v) for k, v in shared(defence, client).items()}
        _, received = protect(defence, zeros, client)
        assert all(bool(tensor.isfinite().all()) for tensor in received.tensors.values())

    def test_batches_stay_images_with_labels(self, name):
        defence = build_defence(name)
        client = make_client(defence)
        for batch in (defence.on_data(make_batch(), client), defence.on_batch(make_batch(), client)):
            assert len(batch.images) == len(batch.labels) == len(batch.sensitive) > 0
            assert batch.images.shape[1:] == (1, 8, 8)
            assert bool(batch.images.isfinite().all())

    def test_the_model_still_gives_outputs(self, name):
        defence = build_defence(name)
        model = defence.on_model(make_model(), SecretStream(0))
        assert model(make_batch().images).shape == (4, 3)

    def test_it_names_its_countermoves(self, name):
        if name in ("none", "chain"):
            pytest.skip("there is nothing to know")
        defence = build_defence(name)
        seen = {k: torch.stack([v, 2 * v, 0 * v]) for k, v in shared(defence, make_client(defence)).items()}
        kept = copy.deepcopy(seen)
        moves = defence.adaptive(Arrived(seen, [0.5], network=make_client(defence).model))
        assert moves, f"{name} names no countermove"
        for move in moves.values():
            assert move.distance in ("", "l2", "l1", "cosine")
            assert set(move.noise) | set(move.weights) <= set(seen)
            assert all(std > 0 for std in move.noise.values())
            if move.sent is not None:
                guess = {k: (v + 0.1).requires_grad_() for k, v in seen.items()}
                sent = move.sent(guess, seen)
                assert {k: v.shape for k, v in sent.items()} == {k: v.shape for k, v in seen.items()}
                total = sum(v.square().sum() for v in sent.values())
                slopes = torch.autograd.grad(total, list(guess.values()), allow_unused=True)
                assert any(slope is not None and bool(slope.any()) for slope in slopes)
                assert all(slope is None or bool(slope.isfinite().all()) for slope in slopes)
        assert same(kept, seen)

    def test_every_number_that_it_declares_is_reported_in_a_training(self, name, tiny):
        defence = build_defence(name)
        for key, text in defence.reports.items():
            assert key.startswith(f"{name.replace('-', '_')}_")
            assert re.fullmatch(r"\w+", key)
            assert text
            assert "\n" not in text
        if defence.reports:
            settings = dataclasses.replace(
                tiny, model="mlp:hidden=6", rounds=1, sensitive="0.2", partition="iid:images=9"
            )
            with Simulation(settings, workers=0, defence=QUICK.get(name, defence)) as simulation:
                assert [set(row["reports"]) for row in simulation.run()] == [set(defence.reports)]

    def test_the_docstring_is_complete(self, name):
        text = inspect.getdoc(components("defences")[name])
        for part in ("Threat model:", "Does not protect:", "Guarantee:", "Reference:", "Differs from the paper:"):
            assert part in text, f"{name} lacks {part!r}"
        fields = [field.name for field in dataclasses.fields(components("defences")[name])]
        for field in fields:
            assert re.search(rf"^\s+{field}: ", text, re.MULTILINE), f"{name} does not explain {field}"

    def test_it_has_its_own_tests(self, name):
        assert (TESTS / f"test_{name.replace('-', '_')}.py").is_file()


def test_every_file_counts():
    files = {info.name for info in pkgutil.iter_modules(gradveil.defences.__path__)} - {"base", "countermove", "parts"}
    assert {name.replace("-", "_") for name in DEFENCES} == files


def test_the_list_of_hooks_is_the_base_class():
    identity = {
        name
        for name, member in vars(Defence).items()
        if inspect.isfunction(member) and not name.startswith("_") and name not in NO_HOOKS
    }
    assert identity == set(HOOKS)
