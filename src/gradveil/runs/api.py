"""The commands as Python functions: ``gradveil.audit``, ``train``, ``attack`` and ``score``.

Each takes the options of its command as keyword arguments. Wherever the command line takes the text of a component or
a path, these take objects as well.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from gradveil.attacks import AnyAttack, Attack
from gradveil.audits.run import AuditResult
from gradveil.audits.run import audit as run_audit
from gradveil.audits.settings import AuditSettings, make_audit_settings
from gradveil.config import TrainSettings, make_train_settings, with_absolute_paths
from gradveil.data import Dataset, NamedSet, Partition
from gradveil.defences import Defence
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.metrics import Metric
from gradveil.metrics.columns import STANDARD
from gradveil.models import Model
from gradveil.own import trusting_code
from gradveil.registry import split_specs
from gradveil.report.criteria import fields_of, parse_criteria
from gradveil.runs.attack import Scoring, attack_files
from gradveil.runs.check import verdicts_of
from gradveil.runs.given import as_texts, fresh_folder, given_settings, usable_workers
from gradveil.runs.results import AttackResult, ScoreResult
from gradveil.runs.score import SCORED, TARGETS, score_settings, summarise_scores
from gradveil.runs.score import score as run_score
from gradveil.runs.train import TrainResult
from gradveil.runs.train import train as run_train
from gradveil.runs.update_spec import UpdateSpec, make_spec, read_spec

F = TypeVar("F", bound=Callable[..., Any])
ACCEPTED: Mapping[str, Any] = {
    "dataset": str | Path | NamedSet | Dataset,
    "aux": str | Path | NamedSet | Dataset,
    "model": str | Model | nn.Module | Callable[..., nn.Module],
    "weights": str | Path,
    "partition": str | Partition,
    "defence": str | Defence,
    "defences": str | Defence | Sequence[str | Defence],
    "attacks": str | AnyAttack | Sequence[str | AnyAttack],
    "metrics": str | Metric | Sequence[str | Metric],
    "knows": str | Sequence[str],
    "defended": str | Sequence[int],
    "lr_steps": str | Sequence[int],
    "save_rounds": str | Sequence[int],
    "tap": str | Sequence[int],
}
"""The types that these functions take for settings, if they take more than the field holds."""


def _takes(settings: type, names: Sequence[str] = (), **defaults: object) -> Callable[[F], F]:
    """Show the fields of a settings class in the signature and in the documentation of a function."""

    def show(function: F) -> F:
        shown = [field for field in fields(settings) if not names or field.name in names]
        options = [(f.name, defaults.get(f.name, f.default), f.type, f.metadata["help"]) for f in shown]
        own = [p for p in signature(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        more = [
            Parameter(n, Parameter.KEYWORD_ONLY, default=d, annotation=ACCEPTED.get(n, kind))
            for n, d, kind, _ in options
        ]
        function.__signature__ = signature(function).replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        lines = "".join(f"        {name} = {default!r}: {text}\n" for name, default, _, text in options)
        function.__doc__ = f"{function.__doc__}\n    Options:\n{lines}"
        return function

    return show


@_takes(AuditSettings)
def audit(  # noqa: PLR0913 - its arguments are the options of the command
    *,
    settings: AuditSettings | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    workers: int | None = None,
    data_root: str | Path | None = None,
    fail_on: str | Sequence[str] = (),
    progress: Callable[[float, int, str], None] | None = None,
    **options: Any,  # noqa: ANN401 - one for each field of AuditSettings
) -> AuditResult:
    """Run attacks against defences and measure what each defence costs, as ``gradveil audit`` does.

    Example::

        import gradveil

        result = gradveil.audit(
            dataset="mnist-5k", defences=["none", "prune:fraction=0.9", MyDefence(strength=2)],
            attacks="gs:iterations=200", targets=4, rounds=2, out="runs/mine",
        )
        result          # a notebook shows the summary and the pictures
        result.rows     # one dictionary per defence, attack, seed and target
        result.report   # the page
        result.verdict  # with fail_on="identified>0.01": passes, fails or not measured

    A component is a text (``"gs:iterations=200"``) or an object (``Gs(iterations=200)``), also one of a class of your
    own. A class that was defined in a notebook or in the running script has no file from which worker processes could
    import it, so the audit then runs in this process.

    Args:
        settings: settings to start from; ``options`` override them.
        out: folder for the results; by default a new one below ``runs``.
        config: TOML file with settings; ``options`` override it.
        resume: continue the run in ``out``, with its settings.
        trust_code: run Python files that are named by files or folders, not only those that you name.
        workers: worker processes; 0 uses this process only. The number never changes results.
        data_root: folder of the data sets.
        fail_on: criteria such as ``identified>0.01``, for the result's ``verdict`` and the privacy card.
        progress: called with the cells done, their number, and what is being done.
        options: the options of ``gradveil audit``, with underscores; see below.

    Raises:
        ConfigError: a setting is wrong; nothing was started.
    """
    given = {**_start(settings, AuditSettings), **as_texts(options)}
    folder = _path("out", out) or fresh_folder("audit", resume)
    together = given_settings("audit", given, _path("config", config), folder, resume, trust_code=trust_code)
    chosen = make_audit_settings(together)
    parse_criteria(fail_on, fields_of(chosen.schema))
    with _hidden_main(), trusting_code(trust_code):
        result = run_audit(
            chosen,
            folder,
            resume=resume,
            workers=usable_workers(_values(chosen), workers),
            data_root=_path("data_root", data_root),
            progress=progress or (lambda done, total, doing: None),
        )
    return replace(result, verdicts=tuple(verdicts_of(result, fail_on)))


@_takes(TrainSettings)
def train(
    *,
    settings: TrainSettings | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    workers: int | None = None,
    data_root: str | Path | None = None,
    progress: Callable[[int, Mapping[str, Any] | None, str], None] | None = None,
    **options: Any,  # noqa: ANN401 - one for each field of TrainSettings
) -> TrainResult:
    """Train a federated model, as ``gradveil train`` does.

    Example::

        import gradveil

        result = gradveil.train(model="lenet5", defence="dp-sgd", clients=10, rounds=5, out="runs/trained")
        result.accuracy             # of the final model, on the test images
        result.rows                 # one dictionary per round

    A component is a text or an object. A model is a text, a function or class that returns a ``torch.nn.Module``, or
    such a module, from whose weights the training starts.

    Args:
        settings: settings to start from; ``options`` override them.
        out: folder for the results; by default a new one below ``runs``.
        config: TOML file with settings; ``options`` override it.
        resume: continue the run in ``out``, with its settings.
        trust_code: run Python files that are named by files or folders, not only those that you name.
        workers: worker processes; 0 uses this process only. The number never changes results.
        data_root: folder of the data sets.
        progress: called with the rounds done, the last row, and what is being done.
        options: the options of ``gradveil train``, with underscores; see below.

    Raises:
        ConfigError: a setting is wrong; nothing was started.
    """
    given = {**_start(settings, TrainSettings), **as_texts(options)}
    folder = _path("out", out) or fresh_folder("train", resume)
    together = given_settings("train", given, _path("config", config), folder, resume, trust_code=trust_code)
    chosen = with_absolute_paths(make_train_settings(together))
    with _hidden_main(), trusting_code(trust_code):
        return run_train(
            chosen,
            folder,
            resume=resume,
            workers=usable_workers(_values(chosen), workers),
            data_root=_path("data_root", data_root),
            progress=progress or (lambda done, row, doing: None),
        )


def attack(  # noqa: PLR0913 - its arguments are the options of the command
    *,
    model_file: str | Path,
    update: str | Path | Sequence[str | Path],
    spec: str | Path | Mapping[str, Any] | UpdateSpec,
    attack: str | Attack = "gs",
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    truth: str | Path | None = None,
    metrics: str | Metric | Sequence[str | Metric] = STANDARD,
    trust_code: bool = False,
) -> AttackResult:
    """Rebuild private images from updates that any framework saved, as ``gradveil attack`` does.

    Example::

        import gradveil

        result = gradveil.attack(
            model_file="model.safetensors", update=["update-0.safetensors", "update-1.safetensors"],
            spec={"model": "lenet5", "shape": [1, 28, 28], "num_classes": 10, "kind": "gradient", "num_examples": 1},
            attack="gs:iterations=1000",
        )
        result            # a notebook shows the pictures
        result.pictures   # their files

    Args:
        model_file: the weights as the server broadcast them (safetensors).
        update: the update of a client, or of several: tensors by parameter name (safetensors or .npz).
        spec: what is known of the updates: a TOML file, a dictionary with its keys, or an `UpdateSpec`.
        attack: an attack with its settings, as text or object.
        out: folder for the results, new or empty; by default a new one below ``runs``.
        seed: every random draw comes from this seed.
        device: cpu, cuda or cuda:1.
        truth: an .npz file with the private ``images``, for scores; the attack never sees it.
        metrics: the metrics of the scores, as a list or as text with commas.
        trust_code: run Python files that ``spec``, if it is a file, or a generator's file names.

    Raises:
        ConfigError: an argument is wrong; nothing was started.
    """
    files = list(update) if isinstance(update, Iterable) and not isinstance(update, str) else [update]
    folder = _path("out", out) or fresh_folder("attack")
    texts = as_texts({"attack": attack, "metrics": metrics})
    chosen = texts["metrics"]
    with trusting_code(trust_code):
        rows = attack_files(
            _given_path("model_file", model_file),
            [_given_path("update", file) for file in files],
            _known(spec),
            texts["attack"],
            folder,
            seed=seed,
            device=device,
            scoring=Scoring(_path("truth", truth), tuple(split_specs(chosen) if isinstance(chosen, str) else chosen)),
        )
    return AttackResult(folder, rows)


def _known(spec: str | Path | Mapping[str, Any] | UpdateSpec) -> UpdateSpec:
    if isinstance(spec, Mapping):
        return make_spec(as_texts(spec), "spec")
    return spec if isinstance(spec, UpdateSpec) else read_spec(_given_path("spec", spec))


@_takes(AuditSettings, SCORED, targets=TARGETS)
def score(
    *,
    settings: AuditSettings | None = None,
    data_root: str | Path | None = None,
    progress: Callable[[float, str], None] | None = None,
    **options: Any,  # noqa: ANN401 - fields of AuditSettings
) -> ScoreResult:
    """Bound what any attacker could recover of an update's images, without attacking, as ``gradveil score`` does.

    Example::

        import gradveil

        result = gradveil.score(defences=["none", "gaussian:std=0.1"], targets=2)
        result.summary   # per defence the best mean PSNR that any guess can have, to first order
        gradveil.score(defences="gaussian:std=0.1", aggregation="secure", clients=4)   # of a mean of four clients

    Args:
        settings: settings to start from; ``options`` override them.
        data_root: folder of the data sets.
        progress: called with the share done, and what is being done.
        options: the options of ``gradveil score``, with underscores; see below.

    Raises:
        ConfigError: a setting is wrong, or the model is too large to score.
    """
    unknown = next((name for name in options if name not in SCORED), None)
    if unknown:
        raise UnknownNameError("setting", unknown, SCORED, wrong=f"A score has no setting {unknown!r}.")
    chosen = score_settings({**_start(settings, AuditSettings), **as_texts(options)})
    rows = run_score(chosen, data_root=_path("data_root", data_root), progress=progress or (lambda share, doing: None))
    return ScoreResult(rows, summarise_scores(rows))


def _values(settings: AuditSettings | TrainSettings) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def _start(settings: AuditSettings | TrainSettings | None, kind: type) -> dict[str, Any]:
    """Return the values of settings to start from, none for None; raise ConfigError if they are of another kind."""
    if settings is None:
        return {}
    if not isinstance(settings, kind):
        raise ConfigError(
            f"settings must be of the class {kind.__name__}, got {type(settings).__name__}. "
            "Give single settings as keyword arguments."
        )
    return _values(settings)


def _path(name: str, given: str | Path | None) -> Path | None:
    return None if given is None else _given_path(name, given)


def _given_path(name: str, given: str | Path) -> Path:
    if not isinstance(given, (str, Path)):
        raise ConfigError(f"{name} must be a path, as text or pathlib.Path, got {given!r}.")
    return Path(given).expanduser()


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep worker processes from running the user's script again: they need nothing of it.

    Python runs the main script in every process that it spawns, which would start this run again in each of them
    unless the script is guarded by ``if __name__ == "__main__"``.
    """
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        if "__file__" in kept:
            del main.__file__
        main.__spec__ = None
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)
