import copy
import gc

import pytest
import torch
from torch import nn

from gradveil.defences import Defence, build_defence
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.threat import Knowledge, Observation, PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch

ALL = ThreatModel(frozenset(Knowledge))


def batches(count=3, size=2, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [
        Batch(
            torch.rand(size, 1, 8, 8, generator=rng),
            torch.randint(0, 3, (size,), generator=rng),
            torch.zeros(size) > 0,
        )
        for _ in range(count)
    ]


def network():
    return create_model("mlp:hidden=5", (1, 8, 8), 3, seed=0)


def test_fedsgd_shows_the_gradient_of_each_clients_batch():
    model, private = network(), batches()
    seen = observe(model, private, threat=ThreatModel(), num_classes=3, protocol=Protocol(lr=0.25))
    assert seen.num_targets == 3
    assert seen.single_step
    for target, batch in enumerate(private):
        loss = nn.functional.cross_entropy(model(batch.images), batch.labels)
        for (name, _), gradient in zip(
            model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            assert torch.allclose(seen.gradients[name][target], gradient, atol=1e-6)


def test_fedavg_shows_the_change_of_the_weights():
    model, private = network(), batches(size=4)
    how = LocalSettings(epochs=2, batch_size=2)
    seen = observe(model, private, threat=ThreatModel.of("local-steps"), num_classes=3, protocol=Protocol(how, 0.1))
    assert not seen.single_step
    assert seen.local_steps == how
    assert seen.lr == 0.1
    with pytest.raises(ThreatModelError, match="single step"):
        _ = seen.gradients


@pytest.mark.parametrize(
    "fact", ["labels", "num_examples", "local_steps", "defence", "public_data", "class_averages", "private_state"]
)
def test_only_granted_knowledge_is_available(fact):
    private = batches()
    given = {"public": PublicKnowledge(batches(1)[0], torch.rand(3, 1, 8, 8))}
    nothing = observe(network(), private, threat=ThreatModel(), num_classes=3, **given)
    with pytest.raises(ThreatModelError, match="does not grant"):
        getattr(nothing, fact)
    everything = observe(network(), private, threat=ALL, num_classes=3, **given)
    assert getattr(everything, fact) is not None
    assert not nothing._facts


def test_granted_labels_are_sorted_since_their_order_is_not_known():
    private = batches(size=5)
    seen = observe(network(), private, threat=ThreatModel.of("labels"), num_classes=3)
    assert seen.labels.tolist() == [sorted(batch.labels.tolist()) for batch in private]


def test_batch_statistics_are_those_of_the_private_batch():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    private = batches(size=4)
    seen = observe(model, private, threat=ThreatModel.of("batch-statistics"), num_classes=3)
    mean, variance = seen.batch_statistics["0"]
    for target, batch in enumerate(private):
        assert mean[target].item() == pytest.approx(batch.images.mean().item(), abs=1e-6)
        assert variance[target].item() == pytest.approx(batch.images.var(correction=0).item(), abs=1e-6)


def test_batch_statistics_are_of_what_the_network_saw_in_every_round():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    grants = ThreatModel.of("batch-statistics", "encodings")
    defence = build_defence("instahide:k=2")
    seen = observe(model, batches(size=4), threat=grants, num_classes=3, defence=defence, protocol=Protocol(rounds=2))
    shown = seen.encodings.images.view(seen.num_targets, -1)
    assert torch.allclose(seen.batch_statistics["0"][0][:, 0], shown.mean(1), atol=1e-6)


def reachable(thing):
    """Return every object that can be reached from here, except classes and modules."""
    seen, queue = {}, [thing]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type) or type(item).__name__ in ("module", "function"):
            continue
        seen[id(item)] = item
        queue += gc.get_referents(item)
        if isinstance(item, torch.Tensor):
            queue += [part for part in (item.grad, item._base) if part is not None]
    return seen.values()


@pytest.mark.parametrize("defended", [False, True])
def test_an_attack_cannot_reach_the_truth(defended):
    class Keeper(Defence):
        def on_update(self, update, client):
            client.state["times"] = torch.ones(1)
            return update

    private = batches(size=3)
    grants = ThreatModel(frozenset(Knowledge) - {Knowledge.PUBLIC_DATA, Knowledge.ENCODINGS})
    seen = observe(
        network(),
        private,
        threat=grants,
        num_classes=3,
        defence=Keeper() if defended else None,
        protocol=Protocol(LocalSettings()),
    )
    truth = {image.numpy().tobytes() for batch in private for image in batch.images}
    storages = {batch.images.untyped_storage().data_ptr() for batch in private}
    tensors = [item for item in reachable(seen) if isinstance(item, torch.Tensor)]
    assert len(tensors) > 5
    for tensor in tensors:
        assert tensor.untyped_storage().data_ptr() not in storages
        rows = tensor.detach().reshape(-1, 64) if tensor.numel() % 64 == 0 and tensor.numel() else torch.empty(0, 64)
        assert not any(row.numpy().tobytes() in truth for row in rows)
    assert not any(isinstance(item, Batch) for item in reachable(seen))


def test_the_search_would_find_a_leak():
    private = batches()
    seen = observe(network(), private, threat=ThreatModel(), num_classes=3)
    leaky = Observation(
        seen.network, seen.updates, {"x": private[0].images}, seen.shape, 3, single_step=True, threat=ThreatModel()
    )
    assert any(item is private[0].images for item in reachable(leaky))


def test_the_network_is_a_copy_and_does_not_change():
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = observe(model, batches(), threat=ThreatModel(), num_classes=3, protocol=Protocol(LocalSettings()))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert seen.network is not model
    assert not seen.network.training


def test_batches_of_different_shapes_are_refused():
    with pytest.raises(ConfigError, match="one shape"):
        observe(network(), [*batches(1, 2), *batches(1, 3)], threat=ThreatModel(), num_classes=3)


def test_a_malicious_server_must_be_granted_and_clients_train_on_its_network():
    model, private = network(), batches(count=1)

    def doubled(copied):
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(2)
        return copied

    federation = Federation(alter=doubled)
    with pytest.raises(ThreatModelError, match="without alters-model"):
        observe(model, private, threat=ThreatModel(), num_classes=3, federation=federation)
    before = copy.deepcopy(model.state_dict())
    seen = observe(model, private, threat=ThreatModel.of("alters-model"), num_classes=3, federation=federation)
    honest = observe(doubled(copy.deepcopy(model)), private, threat=ThreatModel(), num_classes=3)
    assert all(torch.equal(seen.updates[name], honest.updates[name]) for name in honest.updates)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_several_rounds_are_the_same_clients_on_the_same_weights_with_new_draws():
    private = batches(count=2, size=4)
    grants = ThreatModel.of("num-examples", "labels", "encodings")
    how = {"num_classes": 3, "threat": grants, "defence": build_defence("mixup:k=2")}
    seen = observe(network(), private, protocol=Protocol(rounds=3), **how)
    assert (seen.num_targets, seen.rounds, seen.num_examples, seen.num_images) == (6, 3, 4, 4)
    assert seen.labels.shape == (6, 4, 3)
    assert seen.encodings.images.shape == (24, 1, 8, 8)
    once = observe(network(), private, **how)
    later = observe(network(), private, protocol=Protocol(first_round=3), **how)
    for name, tensor in seen.updates.items():
        assert torch.equal(tensor[[0, 3]], once.updates[name])
        assert torch.equal(tensor[[2, 5]], later.updates[name])
        assert not torch.equal(tensor[0], tensor[1])


def test_in_several_rounds_a_client_may_show_few_images_at_a_time():
    private = batches(count=1, size=5)
    how = LocalSettings(algorithm="fedsgd", batch_size=2)
    public = PublicKnowledge(private[0])
    seen = observe(network(), private, threat=ALL, num_classes=3, protocol=Protocol(how, rounds=4), public=public)
    assert (seen.num_examples, seen.num_images) == (2, 5)
    assert seen.labels.shape == (4, 2)
    own = {
        image.numpy().tobytes(): int(label) for image, label in zip(private[0].images, private[0].labels, strict=True)
    }
    labels = [own[image.numpy().tobytes()] for image in seen.encodings.images]
    assert [sorted(labels[start : start + 2]) for start in range(0, 8, 2)] == seen.labels.tolist()
    with pytest.raises(ConfigError, match="batch_size of fedsgd"):
        observe(network(), private, threat=ALL, num_classes=3, protocol=Protocol(how))


def test_data_are_replaced_once_and_state_persists():
    class Counting(Defence):
        def on_data(self, data, client):
            client.state["made"] = client.state.get("made", torch.zeros(())) + 1
            return data

        def on_update(self, update, client):
            client.state["sent"] = client.state.get("sent", torch.zeros(())) + 1
            return update

    seen = observe(network(), batches(1), threat=ALL, num_classes=3, defence=Counting(), protocol=Protocol(rounds=3))
    assert [float(state["made"]) for state in seen.private_state] == [1, 1, 1]
    assert [float(state["sent"]) for state in seen.private_state] == [1, 2, 3]


def test_a_granted_fact_that_nobody_passed_is_named():
    seen = observe(network(), batches(1), threat=ThreatModel.of("public-data"), num_classes=3)
    with pytest.raises(ThreatModelError, match=r"grants public-data, but none was passed to observe\(\)"):
        _ = seen.public_data


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"first_round": 0}, {"lr": 0.0}])
def test_a_protocol_without_rounds_or_steps_is_refused(bad):
    with pytest.raises(ConfigError, match=f"{next(iter(bad))} must be"):
        Protocol(**bad)
