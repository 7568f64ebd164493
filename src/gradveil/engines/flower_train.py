"""One client's protected round inside somebody's own Flower app, for defences that need local training.

The round is played by `gradveil.engines.devices.Devices`, as in a simulation and at a site of gradveil's own app: same
hooks, same private files. Only what may leave the device is returned.
"""

import copy
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.config import TrainSettings, make_train_settings
from gradveil.data.federated import FederatedData
from gradveil.defences import Defence, build_defence
from gradveil.defences.chain import plans
from gradveil.engines.answered import answer_once
from gradveil.engines.devices import Devices, defended, is_private
from gradveil.engines.own_images import Pairs, one_client
from gradveil.engines.own_ledger import AskedUpdate, count_update, policy_of
from gradveil.engines.run_folder import settings_hash
from gradveil.engines.simulation import check_choices, refuse_unmarked, server_network
from gradveil.engines.site_budget import cost_of
from gradveil.engines.site_ledger import digest, weights_digest
from gradveil.engines.site_policy import agree_on_limits
from gradveil.errors import ConfigError, DefenceError, DivergedError, RunFolderError
from gradveil.federated.client import Broadcast
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import Protocol
from gradveil.storage import PrivateFolder
from gradveil.types import Tensors
from gradveil.validate import in_range

OPTIONS = (
    "lr", "epochs", "batch_size", "momentum", "nesterov", "weight_decay", "algorithm", "batch_norm", "rounds",
    "clients", "sampled", "tripwire", "device",
)  # fmt: skip
"""Fields of `TrainSettings` that `train` takes."""
_SERVER_HOOKS = ("on_server", "early_clients", "public")
"""Hooks without whose work on the server a client can't protect, or the server can't read, an update."""


@dataclass(frozen=True)
class ProtectedRound:
    """What a client sends after a round, and what it may not send.

    Attributes:
        arrays: the weights to send, by name: ``ArrayRecord(trained.arrays)``. No private tensor is among them.
        num_examples: number of images behind them, the weight in an average.
        reports: numbers that the defence recorded about its work. They are computed from private images, and no
            guarantee covers them: keep them in the site's log.
    """

    arrays: dict[str, Tensor]
    num_examples: int
    reports: Mapping[str, float]


def train(  # noqa: PLR0913 - a user names them
    model: nn.Module,
    loader: Pairs,
    defence: str | Defence,
    *,
    lr: float,
    round_number: int = 1,
    received: Tensors | None = None,
    folder: str | Path | None = None,
    site: str | Path | None = None,
    client: int = 0,
    aux: Pairs | None = None,
    sensitive: Tensor | None = None,
    seed: int | None = None,
    **options: Any,  # noqa: ANN401 - fields of TrainSettings
) -> ProtectedRound:
    """Train a network on a client's images under a defence, and return what the client sends.

    Example::

        @app.train()
        def train(message, context):
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
            trained = gradveil.flower.train(model, loader, "dp-sgd:noise=1.0", lr=0.1, epochs=2)
            metrics = MetricRecord({"num-examples": trained.num_examples})
            content = RecordDict({"arrays": ArrayRecord(trained.arrays), "metrics": metrics})
            return Message(content, reply_to=message)

    The loss is the cross-entropy, the optimiser SGD. Every draw comes from the system's randomness. What a defence does
    on the server to use updates better (``veil``: momentum and a rate of its own) is not done; it protects nothing.

    Args:
        model: the network, with the received weights unless ``received`` is given; it is not changed.
        loader: a DataLoader or other batches (images, labels), or all images (N, C, H, W) and labels at once. It is
            read once. Defences that change images need pixels in [0, 1].
        defence: the defence with its settings, such as ``soteria:prune=0.6``.
        lr: the learning rate.
        round_number: number of the round, from 1. With a folder, each is trained once, in increasing order.
        received: the tensors that the server sent, for defences that edit the network (fedkl, precode): their server
            starts with `shared_arrays`.
        folder: private folder of this run, needed by defences that keep keys, images or other state, or whose
            guarantee counts rounds (veil); see `private_folder`.
        site: folder of the site with its ``policy.toml``, and a ledger of all updates in all runs, which needs
            ``folder``: the policy's defence, limits of the training, ``max-rounds`` and ``max-epsilon`` are kept.
        client: number of this client, from 0.
        aux: public images and labels, for defences that use them.
        sensitive: (N,) bool, the marked images.
        seed: for tests only: all draws come from this seed, and equal those of a simulation with it.
        options: epochs, batch_size (by default the loader's), momentum (by default 0), nesterov, weight_decay,
            algorithm, batch_norm, rounds, clients, sampled, tripwire and device, as of ``gradveil train``.

    Raises:
        GradveilError: the round could not be protected; then there is nothing to send.
    """
    in_range("round_number", round_number, 1)
    in_range("client", client, 0)
    if site is not None and folder is None:
        raise ConfigError("train(site=...) needs the folder of the run, got none. Pass folder= as well.")
    given = build_defence(defence) if isinstance(defence, str) else defence
    settings = _settings(given, {"lr": lr, **_batch_size(loader), **options}, client, seed)
    settings = given.training(settings)
    planned = given.planned(settings)
    data = one_client(loader, sensitive, aux, client, settings.clients)
    _check(settings, planned, data, model)
    with ExitStack() as stack:
        place = Path(folder).expanduser() if folder is not None else None
        home = place or Path(stack.enter_context(TemporaryDirectory(prefix="gradveil-client-")))
        fresh = secrets.randbits(256) if seed is None else seed
        devices = Devices(settings, data, planned, partial(copy.deepcopy, model), home, fresh)
        if place is None and (devices.net.has_private or planned.overrides("on_data") or plans(given, "planned")):
            raise _needs_folder(planned)
        arrived = dict(model.state_dict() if received is None else received)
        vector = devices.net.shared_vector({name: t.detach() for name, t in arrived.items()})
        if site is not None:
            entries = sum(p.numel() for p in devices.net.module.parameters() if p.requires_grad)
            cost = partial(cost_of, planned, Protocol.of(settings).local, len(data.train), entries=entries)
            run = digest(str(place and place.resolve()), given.spec, settings_hash(settings), len(data.train))
            agree_on_limits(policy_of(Path(site).expanduser()), settings)
            asked = AskedUpdate(run, round_number, weights_digest(arrived), given.spec, cost)
            count_update(Path(site).expanduser(), client, asked)
        if place is not None:
            answer_once(place / str(client) / "answered", round_number)
        played = devices.train(client, Broadcast(vector, lr, round_number))
        if place is None and any(home.rglob("*.safetensors")):
            raise _needs_folder(planned)
        change = devices.net.to_vector(played.update)
        if change is None:
            raise DefenceError(f"Defence {planned.spec!r} must keep the form of an update here, got another one.")
        sent = _sendable(devices.net.shared_tensors(vector + change.to(vector)), arrived, planned)
    return ProtectedRound(sent, played.update.num_examples, dict(played.reports))


def shared_arrays(model: nn.Module, defence: str | Defence) -> dict[str, Tensor]:
    """Return what a server starts with under a defence that edits the network: all tensors that are not private.

    Example::

        strategy.start(grid, ArrayRecord(gradveil.flower.shared_arrays(Net(), "fedkl")), num_rounds=3)
    """
    net = _network(model, build_defence(defence) if isinstance(defence, str) else defence)
    return {name: tensor.clone().contiguous() for name, tensor in net.shared_tensors(net.values[net.shared]).items()}


def own_network(
    model: nn.Module, defence: str | Defence, received: Tensors, folder: str | Path, client: int = 0
) -> nn.Module:
    """Return the network of a client with its own private tensors, such as keys and locks, to evaluate it.

    Args:
        model: the network before the defence edits it; it is not changed.
        defence: as in `train`.
        received: the tensors that the server sent.
        folder: as in `train`.
        client: as in `train`.

    Raises:
        RunFolderError: the client has not trained yet, or has lost its private tensors.
    """
    net = _network(model, build_defence(defence) if isinstance(defence, str) else defence)
    net.receive(net.shared_vector(received))
    if net.has_private:
        place = PrivateFolder(Path(folder).expanduser() / str(client) / "private")
        saved = place.load_state(2**62)
        if saved is None:
            raise RunFolderError(f"{place.path} must hold the client's private tensors, got none. Train first.")
        net.set_private({k.removeprefix("model."): t for k, t in saved.items() if k.startswith("model.")})
    return net.module.eval()


def _network(model: nn.Module, defence: Defence) -> FlatModel:
    module = defended(copy.deepcopy(model), defence, 0, "server")
    return FlatModel(module, is_private(module, defence, TrainSettings()))


def _settings(defence: Defence, options: dict[str, Any], client: int, seed: int | None) -> TrainSettings:
    """Return the settings of the round. Raise if an option is unknown, or the defence can't be played by a client."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(f"train() takes {', '.join(OPTIONS)}, got {unknown[0]!r}. Correct or drop it.")
    needed = [hook for hook in _SERVER_HOOKS if defence.overrides(hook)]
    if needed:
        raise ConfigError(
            f"train() takes defences that a client plays alone, got {defence.spec!r}, whose server has work to do "
            f"({', '.join(needed)}). Use gradveil's own app (docs/flower.md)."
        )
    if "rounds" not in options and plans(defence, "planned"):
        raise ConfigError(f"Defence {defence.spec!r} needs to know how many rounds there are, got none. Add rounds=.")
    usual = {"momentum": 0.0, "clients": client + 1, "seed": 0 if seed is None else seed}
    return make_train_settings({**usual, **options})


def _batch_size(loader: Pairs) -> dict[str, int]:
    size = getattr(loader, "batch_size", None)
    return {"batch_size": size} if isinstance(size, int) else {}


def _check(settings: TrainSettings, defence: Defence, data: FederatedData, model: nn.Module) -> None:
    """Raise before any work if the defence can't protect this network's training on these images."""
    check_choices(settings, defence)
    if defence.fewest_clients > 1:
        raise ConfigError(f"Defence {defence.spec!r} needs secure aggregation, got updates in the open. Use at=client.")
    defence.check_images(len(data.train), aux=data.aux is not None)
    refuse_unmarked(defence, data.count("sensitive", None))
    with torch.no_grad():
        like = next((p for p in model.parameters()), torch.zeros(()))
        outputs = copy.deepcopy(model).eval()(torch.zeros(2, *data.shape).to(like))
    server_network(replace(settings, rounds=1), defence, partial(copy.deepcopy, model), data.shape, outputs.shape[-1])


def _sendable(weights: Tensors, arrived: Tensors, defence: Defence) -> dict[str, Tensor]:
    """Return the weights in the order in which they arrived; integers and local statistics go back as they came."""
    hidden = [name for name in weights if defence.private(name)]
    if hidden or any(not bool(tensor.isfinite().all()) for tensor in weights.values()):
        raise DivergedError("What is sent must be finite and shared, got other numbers. Lower the learning rate.")
    return {
        name: weights[name].detach().cpu().contiguous().clone() if name in weights else tensor.detach().cpu().clone()
        for name, tensor in arrived.items()
    }


def _needs_folder(defence: Defence) -> ConfigError:
    return ConfigError(
        f"Defence {defence.spec!r} keeps private files, or counts rounds, got no folder for that. Pass "
        "folder=gradveil.flower.private_folder(context), and name it in the node config: "
        "--node-config \"private-folder='/srv/gradveil'\"."
    )
