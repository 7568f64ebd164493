"""The one schema of rows: every field of a run's rows, and of the lines that sum them up.

A table is a kind of row (``privacy``, ``utility``, ``membership``, ``round``, ``client``, ``attack``) or a kind of
line: ``summary`` sums up privacy rows, ``costs`` utility rows, ``members`` membership rows; ``price`` is the part of
``costs`` that stands beside every line of the summary. To add a field, add its `Column` to `COLUMNS`: files, tables,
pages and ``--json`` follow. The columns of metrics come from the metrics themselves, see `gradveil.metrics.columns`.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

Row = dict[str, Any]

KINDS = ("privacy", "utility", "membership")
"""The kinds of rows of an audit."""


@dataclass(frozen=True)
class Column:
    """One field of a table.

    Attributes:
        key: its name in rows.jsonl, in CSV files and in ``--json``.
        type: text, flag (yes or no), verdict (yes, no or unknown), index (a whole number), number, texts, numbers
            (lists), or mapping (numbers by name).
        head: what stands above the column.
        help: what the field means, in a sentence without a full stop.
        format: how a value is written for people, see `Column.text`.
        leakier: whether a higher value means a larger leak; None if the field does not measure a leak.
        tables: the tables that have it.
        mean: whether a line of the summary holds the mean of its rows' values.
        shown: whether pages show it.
        later: whether rows may lack it, because earlier versions did not write it or the run had no use for it.
    """

    key: str
    type: str
    head: str
    help: str = ""
    format: str = ""
    leakier: bool | None = None
    tables: tuple[str, ...] = ()
    mean: bool = False
    shown: bool = True
    later: bool = False

    @property
    def is_text(self) -> bool:
        """Whether the column is sorted and aligned as text."""
        return self.type not in ("index", "number")

    def text(self, line: Mapping[str, Any], *, short: bool = False) -> str:
        """Return the field of a row or line as people read it, or "" if it has none.

        Formats of numbers: digits behind the point, ``%`` (a share), ``+%`` (a difference of shares), ``×`` (a
        multiple), ``g`` (four significant digits), ``of n`` or ``of images`` (a count among the line's n or
        images), ``interval`` (with its 95 % interval), ``points`` (percentage points, with their 95 % interval),
        ``budget`` (an epsilon with its delta) and ``estimate`` (three significant digits, with an interval). ``short``
        leaves out intervals and deltas.

        Example:
            >>> Column("accuracy", "number", "Accuracy", format="%").text({"accuracy": 0.9691})
            '96.9 %'
            >>> Column("knows", "texts", "Attacker knew").text({"knows": ["labels", "defence"]})
            'labels, defence'
        """
        value = line.get(self.key)
        if value is None:
            return ""
        if self.format == "attacker":
            return "adaptive" if value else "plain"
        if self.type in ("flag", "verdict"):
            return "yes" if value else "no"
        if self.type in ("texts", "numbers"):
            return ", ".join(map(str, value))
        if self.type == "mapping":
            return ", ".join(f"{name} –" if n is None else f"{name} {n:.4g}" for name, n in value.items())
        return str(value) if self.type == "text" else self._figure(value, line, short)

    def _figure(self, value: float, line: Mapping[str, Any], short: bool) -> str:
        if self.format.startswith("of "):
            if not line[self.format[3:]]:
                return "failed" if self.leakier and line.get("failed") else ""
            return f"{value} of {line[self.format[3:]]}"
        if self.format in ("interval", "points"):
            digits = 2 if self.format == "interval" else 1
            low, high = (line.get(f"{self.key}_{end}") for end in ("low", "high"))
            ends = "(1 seed)" if low is None or high is None else f"[{low:.{digits}f}, {high:.{digits}f}]"
            return f"{value:.{digits}f}" if short else f"{value:.{digits}f} {ends}"
        if self.format == "estimate":
            low, high = (line.get(f"{self.key}_{end}") for end in ("low", "high"))
            return f"{value:.3g}" if low is None or high is None or short else f"{value:.3g} [{low:.3g}, {high:.3g}]"
        if self.format == "budget":
            delta = line.get(self.key.replace("epsilon", "delta"))
            return f"{value:.3g}" if delta is None or short else f"{value:.3g} at δ = {delta:.3g}"
        if self.format.endswith("%"):
            return f"{100 * value:{self.format[:-1]}.1f} %"
        if self.format == "×":
            return f"{value:.2f}×"
        return f"{value:,.{self.format}f}" if self.format.isdigit() else f"{value:.4g}"


@dataclass(frozen=True)
class Schema:
    """All columns of a run, those of its metrics included.

    Attributes:
        columns: in the order of files and tables; a key occurs once in each table.
        metrics: those of `columns` that compare a guess with the truth, one per metric.
    """

    columns: tuple[Column, ...]
    metrics: tuple[Column, ...] = ()

    def __post_init__(self) -> None:
        places = [(table, column.key) for column in self.columns for table in column.tables]
        twice = next((place for place in places if places.count(place) > 1), None)
        if twice:
            raise ValueError(f"A table must have each column once, got {twice[1]!r} twice in {twice[0]}.")

    @cached_property
    def _tables(self) -> dict[tuple[str, ...], tuple[Column, ...]]:
        return {}

    def of(self, *tables: str) -> tuple[Column, ...]:
        """Return the columns of one or several tables, each key once."""
        if tables not in self._tables:
            found: dict[str, Column] = {}
            for table in tables:
                for column in self.columns:
                    if table in column.tables:
                        found.setdefault(column.key, column)
            self._tables[tables] = tuple(found.values())
        return self._tables[tables]

    def keys(self, *tables: str) -> list[str]:
        """Return the keys of one or several tables, each once."""
        return [column.key for column in self.of(*tables)]

    def column(self, table: str, key: str) -> Column:
        """Return one column of a table."""
        return next(column for column in self.of(table) if column.key == key)

    def used(self, lines: Iterable[Mapping[str, Any]], *tables: str) -> list[Column]:
        """Return the columns of tables, without empty ones of metrics that were not asked for."""
        keys = [metric.key for metric in self.metrics if not metric.shown]
        unasked = {name for key in keys for name in (key, f"blind_{key}", *_DERIVED.get(key, ()))}
        done = [line for line in lines if line.get("n") != 0]  # lines whose attacks all failed count nothing
        filled = {key for line in done for key in unasked if line.get(key) is not None}
        return [column for column in self.of(*tables) if column.key not in unasked - filled]

    def with_metrics(self, metrics: Iterable[Column]) -> "Schema":
        """Return the schema with these metrics in place of its own."""
        new = tuple(metrics)
        old = {*self.metrics, *map(blind_column, self.metrics)}
        rest = [column for column in self.columns if column not in old]
        place = [column.key for column in rest].index(BEHIND_METRICS)
        return Schema((*rest[:place], *new, *map(blind_column, new), *rest[place:]), new)

    def row(self, table: str, values: Mapping[str, Any]) -> Row:
        """Return a row with its fields in order; fields that may be missing become None.

        Raises:
            ValueError: a key is no column of the table, or a field is missing.
        """
        self.check(table, values)
        columns = self.of(table)
        missing = [column.key for column in columns if not column.later and column.key not in values]
        if missing:
            raise ValueError(f"A row of table {table!r} must have all its fields, got none of: {', '.join(missing)}.")
        return {column.key: values.get(column.key) for column in columns}

    def check(self, table: str, values: Mapping[str, Any]) -> None:
        """Raise ValueError if a key is no column of the table."""
        unknown = self.unknown(table, values)
        if unknown:
            raise ValueError(
                f"A row of table {table!r} must hold columns of the schema only, got {', '.join(map(repr, unknown))}. "
                "Add a Column to gradveil.rows."
            )

    def unknown(self, table: str, values: Mapping[str, Any]) -> list[str]:
        """Return the keys that are no column of the table."""
        known = set(self.keys(table))
        return [key for key in values if key not in known]

    def blank(self, table: str) -> Row:
        """Return a row of None."""
        return dict.fromkeys(self.keys(table))

    def read(self, raw: object) -> Row | None:
        """Return a saved audit row with the fields of all kinds, each in its type; None if it is no row.

        Values of another type, and numbers that are not finite, become None (texts "", flags False, indices 0).
        """
        if not isinstance(raw, Mapping) or not isinstance(raw.get("defence"), str):
            return None
        if raw.get("kind", "privacy") not in KINDS:
            return None
        row = {column.key: _READERS[column.type](raw.get(column.key)) for column in self.of(*KINDS)}
        return row | {"kind": raw.get("kind", "privacy")}

    def read_line(self, table: str, raw: Mapping[str, Any]) -> Row:
        """Return the fields that a saved row of a table has, each in its type; fields of other names are left out."""
        there = [column for column in self.of(table) if column.key in raw]
        return {c.key: None if raw[c.key] is None else _READERS[c.type](raw[c.key]) for c in there}


def blind_column(metric: Column) -> Column:
    """Return the column of a metric's value for the blind guess."""
    return replace(
        metric,
        key=f"blind_{metric.key}",
        head=f"Blind {metric.head}",
        help=f"{metric.head} of a blind guess, made from public images without the update",
        leakier=None,
        tables=_PRIVACY,
        shown=metric.shown and metric.key == "psnr",
        later=True,
    )


def to_plain(columns: Iterable[Column]) -> list[dict[str, Any]]:
    """Return columns as JSON values."""
    return [{key: list(v) if isinstance(v, tuple) else v for key, v in asdict(column).items()} for column in columns]


def from_plain(values: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the columns of metrics that `to_plain` wrote. Raise TypeError or ValueError if it wrote no such values.

    The file may be damaged: every field has its type, and a format that no metric has becomes ``g``.
    """
    if not isinstance(values, list) or len(values) > _MOST_METRICS:
        raise ValueError(f"Columns of metrics must be a list of at most {_MOST_METRICS}.")
    return tuple(_metric(Column(**{**value, "tables": tuple(value["tables"])})) for value in values)


def _metric(column: Column) -> Column:
    """Return a metric's column with a usual format. Raise ValueError if another field is none of a metric."""
    texts = (column.key, column.head, column.help, column.format, *column.tables)
    flags = (column.mean, column.shown, column.later, column.leakier is None or column.leakier)
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(flag, bool) for flag in flags):
        raise ValueError("A metric's column must have texts and flags.")
    if column.type != "number" or not column.mean or column.tables not in _METRIC_TABLES:
        raise ValueError("A metric's column must hold numbers of rows, of which the summary has the mean.")
    return column if re.fullmatch(r"[0-9]|g|\+?%|×", column.format) else replace(column, format="g")


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _texts(value: object) -> list[str] | None:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _numbers(value: object) -> list[float] | None:
    numbers = [_number(item) for item in value] if isinstance(value, (list, tuple)) else [None]
    whole = [number for number in numbers if number is not None]
    return whole if len(whole) == len(numbers) else None


def _mapping(value: object) -> dict[str, float] | None:
    if not isinstance(value, Mapping):
        return None
    return {str(name): number for name, item in value.items() if (number := _number(item)) is not None}


_READERS = {
    "text": _text,
    "flag": lambda value: value is True,
    "verdict": lambda value: value if isinstance(value, bool) else None,
    "index": lambda value: value if isinstance(value, int) and not isinstance(value, bool) else 0,
    "number": _number,
    "texts": _texts,
    "numbers": _numbers,
    "mapping": _mapping,
}

BEHIND_METRICS = "identified"
"""The column before which a run's metrics stand."""

_DERIVED = {
    "psnr": ("psnr_low", "psnr_high", "psnr_worst", "image_psnr"),
    "ssim": ("recognisable", "images_recognisable", "image_ssim"),
}
"""Columns that are computed from a metric, beside its own and that of its blind guess."""

_PRIVACY, _MEMBERS = ("privacy", "summary"), ("membership", "members")
_METRIC_TABLES = (("privacy", "attack"), ("privacy", "attack", "summary"))
_MOST_METRICS = 100
_COSTS = ("utility", "costs", "price")

COLUMNS = (
    Column("kind", "text", "Kind", "What the row is about", tables=(*KINDS, "round")),
    Column("defence", "text", "Defence", "Defence with its settings",
           tables=(*KINDS, "summary", "costs", "members", "attack")),
    Column("attack", "text", "Attack", "Attack with its settings", tables=(*_PRIVACY, *_MEMBERS, "attack")),
    Column("adaptive", "flag", "Attacker", "adaptive knows the defence, plain does not", "attacker",
           tables=(*_PRIVACY, "attack")),
    Column("adaptive", "flag", "Attacker", "adaptive plays shadow models under the defence, plain does not", "attacker",
           tables=("members",)),
    Column("adaptive", "flag", "Attacker", "adaptive plays shadow models under the defence, plain does not", "attacker",
           tables=("membership",), later=True),
    Column("seed", "index", "Seed", "Seed of everything random", "0", tables=(*KINDS, "attack")),
    Column("target", "index", "Target", "Number of the attacked update", "0", tables=("privacy", "attack")),
    Column("round", "index", "Round", "", "0", tables=("membership", "round")),
    Column("round", "index", "Round", "Round of the training in which the update was sent", "0", tables=("privacy",),
           later=True),
    Column("later_rounds", "numbers", "Later rounds", "Rounds that were attacked together with this one",
           tables=("privacy",), shown=False, later=True),
    Column("client", "index", "Client", "Number of the client", "0", tables=("membership", "client")),
    Column("client", "index", "Client", "Number of the client, or -1 if the update is the mean of a round's clients",
           "0", tables=("privacy",), later=True),
    Column("local_steps", "index", "Steps", "Local steps behind the attacked update", "0", tables=("privacy",),
           later=True),
    Column("batch_norm", "text", "BatchNorm", "Running statistics in training: average, local or freeze",
           tables=("privacy",), later=True),
    Column("signal_to_noise", "number", "Signal / noise", "Norm of the undefended update over the norm of what the "
           "defence changed, if it adds noise", "g", True, ("privacy",), later=True),
    Column("branched", "flag", "Branched", "Whether the round was played again from the tapped one, for a server that "
           "alters the model or looks several times", tables=("privacy",), later=True),
    Column("update_sha256", "text", "Update", "Digest of the attacked tensors", shown=False, tables=("privacy",),
           later=True),
    Column("seeks", "text", "Seeks", "What the attack looks for: pictures, or labels alone", shown=False,
           tables=_PRIVACY, later=True),
    Column("later_sha256", "texts", "Later updates", "Digests of the updates of later_rounds", shown=False,
           tables=("privacy",), later=True),
    Column("n", "index", "n", "Attacked targets, over all seeds", "0", tables=("summary",)),
    Column("n", "index", "n", "Attacked local models, over all seeds", "0", tables=("members",)),
    Column("seeds", "index", "Seeds", "Number of seeds", "0", shown=False, tables=("summary", "costs", "members")),
    Column("failed", "index", "Failed", "Number of failed rows", "0", shown=False, tables=("summary", "members")),
    Column("images", "index", "Images", "Attacked images, over all targets and seeds", "0", shown=False,
           tables=("summary",)),
    Column("recognisable", "index", "Recognisable", "Images with an SSIM to the truth of at least 0.5 that are also "
           "clearly above their blind guesses (0.02 of SSIM and 2 dB)", "of images", True, ("summary",)),
    Column("psnr", "number", "PSNR, dB [95 %]", "Mean of the seeds' means, with its t interval over seeds", "interval",
           True, ("summary",)),
    Column("psnr_low", "number", "PSNR, low", "Lower end of the interval", "2", shown=False, tables=("summary",)),
    Column("psnr_high", "number", "PSNR, high", "Upper end of the interval", "2", shown=False, tables=("summary",)),
    Column("psnr_worst", "number", "Worst PSNR", "Worst case: the largest PSNR of all images and seeds", "2", True,
           ("summary",)),
    Column("identified", "number", "Identified", "Share of the images that the guess picks out of many (`candidates`) "
           "by the least MSE", "%", True, _PRIVACY, mean=True, later=True),
    Column("candidates", "number", "Candidates", "Images that the true one is picked out of: itself and others that "
           "are no targets; the chance of a single guess is one divided by this", "0", tables=_PRIVACY, mean=True,
           shown=False, later=True),
    Column("blind", "text", "Blind guess", "What a blind guess is: the class average of public images if labels are "
           "known or guessed, else their mean", "note", tables=_PRIVACY, shown=False, later=True),
    Column("blind_identified", "number", "Blind, identified", "Share of the images that the blind guess picks out",
           "%", tables=_PRIVACY, mean=True, shown=False, later=True),
    Column("label_accuracy", "number", "Labels", "Share of the labels that were recovered, if any was guessed", "%",
           True, _PRIVACY, mean=True),
    Column("blind_label_accuracy", "number", "Blind, labels", "Share of the labels that a guess by the classes' shares "
           "of public images gets right", "%", tables=_PRIVACY, mean=True, shown=False, later=True),
    Column("guessed", "number", "Guessed", "Share of the images that have a guess; metrics are means over these", "%",
           True, _PRIVACY, mean=True, later=True),
    Column("images", "number", "Images", "Private images behind the attacked update", "0", tables=("privacy",),
           later=True),
    Column("images_recognisable", "number", "Recognisable", "Images with an SSIM of at least 0.5 and clearly above "
           "their blind guesses", "0", True, ("privacy",), later=True),
    Column("image_psnr", "numbers", "PSNR of each image", "Of a batch: the largest first", tables=("privacy",),
           shown=False, later=True),
    Column("image_ssim", "numbers", "SSIM of each image", "Of a batch, in the order of image_psnr", tables=("privacy",),
           shown=False, later=True),
    Column("attack_steps", "number", "Attack's steps", "Steps of the attack's search, over all its phases", "0",
           tables=("privacy",), later=True),
    Column("converged", "verdict", "Converged", "Whether the attack met its own criterion",
           tables=("privacy", "attack")),
    Column("not_converged", "index", "Attack did not converge", "Targets on which the attack did not converge and "
           "did not recover all images either", "of n",
           tables=("summary",)),
    Column("attacker_loss", "number", "Attacker's loss", "By which the attack chose its answer", "g",
           tables=("privacy", "attack")),
    Column("auc", "number", "AUC", "Area under the ROC curve; 0.5 is guessing", "3", True, _MEMBERS, mean=True),
    Column("auc_low", "number", "AUC, low", "Lower end of the area's 95 % interval over images", "3", shown=False,
           tables=("membership",), later=True),
    Column("auc_high", "number", "AUC, high", "Upper end of the area's 95 % interval over images", "3", shown=False,
           tables=("membership",), later=True),
    Column("auc_worst", "number", "Worst AUC", "The largest of all rounds and seeds", "3", True, ("members",)),
    Column("tpr_at_1_fpr", "number", "TPR at 1 % FPR", "Members found while one in a hundred others is taken for a "
           "member", "%", True, _MEMBERS, mean=True),
    Column("advantage", "number", "Advantage", "Largest difference of the true and the false positive rate", "3", True,
           _MEMBERS, mean=True),
    Column("auc_loss", "number", "AUC, loss", "AUC of a threshold on the loss, which needs the model's outputs", "3",
           True, _MEMBERS, mean=True),
    Column("auc_confidence", "number", "AUC, confidence", "AUC of a threshold on the largest probability", "3", True,
           _MEMBERS, mean=True),
    Column("gap", "number", "Accuracy gap", "Accuracy on members minus accuracy on others", "+%", True, ("members",)),
    Column("members", "number", "Members", "Images of the client that were tried, with as many others", "0",
           tables=_MEMBERS, mean=True),
    Column("non_members", "number", "Others", "Images of others that were tried", "0", tables=("membership",)),
    Column("queries", "number", "Queries", "Queries of the model per image", "0", tables=("membership",)),
    Column("accuracy_members", "number", "Accuracy, members", "", "%", tables=("membership",)),
    Column("accuracy_non_members", "number", "Accuracy, others", "", "%", tables=("membership",)),
    Column("roc", "numbers", "ROC curve", "True positive rates", shown=False, tables=("membership",)),
    Column("images", "index", "Images", "Training images of the client", "0", tables=("client",)),
    Column("accuracy_own", "number", "Accuracy, own", "On the client's own training images", "%", tables=("client",)),
    Column("accuracy_test", "number", "Accuracy, test", "On the test images", "%", tables=("client",)),
    Column("knows", "texts", "Attacker knew", "What the attacker knew beside the model and the update", "note",
           tables=(*_PRIVACY, "membership", "attack")),
    Column("knows", "texts", "Attacker knew", shown=False, tables=("members",)),
    Column("labels", "numbers", "Labels", "Known or guessed labels", tables=("attack",)),
    Column("countermove", "text", "Countermove", "What the attacker did about the defence", "note",
           tables=("privacy",), later=True),
    Column("flags", "texts", "Flags", "Why a comparison needs care", "note", tables=_PRIVACY, later=True),
    Column("not_decoded", "text", "Not decoded", "What the attacker lacked to decode what the defence hides", "note",
           tables=_PRIVACY, later=True),
    Column("epsilon", "number", "ε", "Privacy budget", "g", True, ("privacy", "utility", "costs")),
    Column("epsilon", "number", "ε of the update", "Privacy budget of the attacked update", "budget", True,
           ("summary",)),
    Column("delta", "number", "δ", "Chance that the privacy budget does not hold", "g",
           tables=("privacy", "utility", "costs")),
    Column("delta", "number", "δ of the update", "Chance that the budget of the update does not hold", "g", shown=False,
           tables=("summary",)),
    Column("epsilon", "number", "ε", "Privacy budget of the whole training, as the defence states it", "g", True,
           ("round",), later=True),
    Column("delta", "number", "δ", "Chance that the stated budget does not hold", "g", tables=("round",), later=True),
    Column("mu", "number", "μ", "Gaussian differential privacy of the same releases: telling two neighbouring data "
           "sets apart is as hard as telling N(0, 1) from N(μ, 1)", "g", True, ("privacy", "utility", "costs", "round"),
           later=True),
    Column("identified_bound", "number", "Identified, at most", "Largest chance with which any attacker can pick the "
           "true image out of 1,000, by μ", "%", True, ("privacy", "utility", "costs", "round"), later=True),
    Column("mu", "number", "μ of the update", "Gaussian differential privacy of the attacked update", "g", True,
           ("summary",), shown=False, later=True),
    Column("identified_bound", "number", "Identified, at most", "Largest chance with which any attacker can pick the "
           "true image out of 1,000 by the attacked update", "%", True, ("summary",), shown=False, later=True),
    Column("epsilon_hat", "number", "ε by canaries [99 %]", "Epsilon of the training that canaries measure, with its "
           "interval; 1e+09 means that no noise was found", "estimate", True, (*_COSTS, "round"), later=True),
    Column("epsilon_hat_low", "number", "ε by canaries, low", "Lower end of the interval", "g", shown=False,
           tables=(*_COSTS, "round"), later=True),
    Column("epsilon_hat_high", "number", "ε by canaries, high", "Upper end of the interval", "g", shown=False,
           tables=(*_COSTS, "round"), later=True),
    Column("delta_hat", "number", "δ by canaries", "Delta at which the canaries' epsilon is measured", "g", shown=False,
           tables=(*_COSTS, "round"), later=True),
    Column("canaries", "number", "Canaries", "Random canaries that were played beside the training", "0", shown=False,
           tables=(*_COSTS, "round"), later=True),
    Column("canaries_exceed", "verdict", "Canaries exceed", "Whether the canaries' whole interval lies above the "
           "stated epsilon: then the defence does not keep it", tables=(*_COSTS, "round"), shown=False, later=True),
    Column("certificate", "number", "Certified distance", "First order, for attackers of the protected layer alone",
           "2", False, _PRIVACY, mean=True),
    Column("tripwire", "texts", "Tripwire", "What the tripwire found in an altered model", "note", tables=("privacy",),
           later=True),
    Column("epsilon_training", "number", "ε of the training", "Privacy budget of the whole training", "budget", True,
           ("price",)),
    Column("delta_training", "number", "δ of the training", "Chance that the budget of the training does not hold", "g",
           shown=False, tables=("price",)),
    Column("accuracy", "number", "Accuracy", "Test accuracy after training with the defence", "%",
           tables=(*_COSTS, "members", "round"), mean=True),
    Column("accuracy_balanced", "number", "Balanced accuracy", "Mean over the classes of each class's test accuracy",
           "%", tables=(*_COSTS, "round"), mean=True, later=True),
    Column("accuracy_majority", "number", "Majority class", "Share of the most frequent class among the test images: "
           "the accuracy of always naming it", "%", tables=(*_COSTS, "round"), mean=True, later=True),
    Column("points_lost", "number", "Points lost [95 %]", "Accuracy undefended minus accuracy with the defence, in "
           "percentage points: mean of the seeds' differences, with its t interval over seeds", "points",
           tables=("costs", "price")),
    Column("points_lost_low", "number", "Points lost, low", "Lower end of the interval", "1", shown=False,
           tables=("costs", "price")),
    Column("points_lost_high", "number", "Points lost, high", "Upper end of the interval", "1", shown=False,
           tables=("costs", "price")),
    Column("accuracy_sensitive", "number", "Sensitive accuracy", "Accuracy on the images that are marked sensitive",
           "%", tables=(*_COSTS, "round"), mean=True),
    Column("accuracy_server", "number", "Server's accuracy", "Test accuracy of the server's model with its own random "
           "private part", "%", tables=("round",), later=True),
    Column("loss", "number", "Loss", "Loss on the test images", "g", tables=("utility", "round")),
    Column("at_chance", "flag", "At chance", "Whether test loss and accuracy are no better than those of a guess",
           shown=False, tables=("utility", "costs", "round"), later=True),
    Column("lr", "number", "Learning rate", "", "g", tables=("round",)),
    Column("clients", "index", "Clients", "Clients that trained in the round", "0", tables=("round",), shown=False),
    Column("dropped", "texts", "Dropped", "Clients that the server went on without, each with the reason", "note",
           tables=("round",), later=True),
    Column("sum_clipped", "number", "Clipped in the sum", "Share of the entries that were clipped before they were "
           "added up as whole numbers (--sum-bits)", "%", tables=("round",), later=True),
    Column("sum_error", "number", "Error of the sum", "Norm of the difference between the sum of whole numbers and the "
           "exact sum, over the norm of the exact one", "g", tables=("round",), later=True),
    Column("tripwire_warnings", "index", "Tripwire warnings", "Clients that found a trap", "0", tables=("round",),
           later=True),
    Column("reports", "mapping", "Reports", "Numbers that the defence reported, means over the clients of a round",
           "note", tables=(*_COSTS, "round"), mean=True, later=True),
    Column("round_seconds", "number", "s / round", "Seconds per round; on a CPU, of computing time", "2",
           tables=_COSTS, mean=True),
    Column("round_seconds_undefended", "number", "s / round, undefended", "Seconds per round of the undefended "
           "training that took turns with this one, by the same clock", "2", tables=_COSTS, mean=True, later=True),
    Column("overhead", "number", "Overhead", "Seconds per round as a multiple of the undefended ones", "×",
           tables=(*_COSTS, "members"), mean=True),
    Column("rounds", "number", "Rounds", "Rounds of training", "0", shown=False, tables=_COSTS, mean=True),
    Column("unmeasured", "texts", "Not measured", "Why figures are missing", "note", tables=("privacy", "attack"),
           shown=False, later=True),
    Column("seconds", "number", "Seconds", "Seconds that the row took", "2", tables=(*KINDS, "round", "attack")),
    Column("seconds", "number", "s / target", "Seconds that the attack took per target", "2", tables=("summary",),
           mean=True),
    Column("seconds", "number", "s / round", "Seconds per attacked round", "2", shown=False, tables=("members",),
           mean=True),
    Column("why", "text", "Note", "What was odd, or why the row failed", "note", tables=(*KINDS, "costs", "attack")),
    Column("failed", "flag", "Failed", "Whether the row could not be worked out", shown=False, tables=KINDS),
    Column("cell", "text", "Cell", "The piece of the audit that the row belongs to", shown=False, tables=KINDS),
)  # fmt: skip
"""All columns but those of metrics. Their order is that of files and tables."""
