"""The columns that metrics have in rows and tables; each metric states its own."""

import inspect
from collections.abc import Iterable
from dataclasses import replace

from gradveil import rows
from gradveil.errors import ConfigError
from gradveil.metrics.base import Metric
from gradveil.registry import build, parse_spec
from gradveil.rows import Column, Schema

STANDARD = ("mse", "psnr", "ssim", "lpips")
"""The metrics that every row has a field for, by the name of the field."""
NAMES = {"lpips": "lpips-alex"}
"""Fields of rows that are also accepted as the name of a metric."""


def build_metric(spec: str) -> Metric:
    """Build a metric from its text; ``lpips`` is the version that rows have.

    Example:
        >>> build_metric("lpips").spec
        'lpips-alex'
    """
    name = parse_spec(spec)[0]
    return build(Metric, NAMES[name] + spec.removeprefix(name) if name in NAMES else spec)


def metric_column(metric: Metric) -> Column:
    """Return a metric's column: name, head, format and direction are the metric's, help is its docstring's first line.

    Example:
        >>> column = metric_column(build_metric("psnr"))
        >>> column.key, column.head, column.leakier
        ('psnr', 'PSNR, dB', True)
    """
    cls = type(metric)
    first = (inspect.getdoc(cls) or "").partition("\n")[0].rstrip(".")
    key = cls.field or cls.name.replace("-", "_")
    lines = () if key == "psnr" else ("summary",)  # there the PSNR has an interval and a column of its own
    head = cls.head or key.replace("_", " ")
    return Column(
        key, "number", head, first, cls.format, cls.higher_is_leakier, ("privacy", "attack", *lines), mean=True
    )


def schema_of(metrics: Iterable[str] = ()) -> Schema:
    """Return the schema of rows with the standard metrics and these.

    If some are named, pages and CSV files leave out the standard metrics that are not.

    Raises:
        ConfigError: two metrics have the same field, or a metric's field is that of something else.
    """
    found: dict[str, Metric] = {}
    for metric in map(build_metric, metrics):
        key = metric_column(metric).key
        if found.setdefault(key, metric) != metric:
            raise ConfigError(f"Each metric must have a field of its own, got two for {key!r}. Drop one of --metrics.")
    asked = set(found) or {*STANDARD}
    for key in STANDARD:
        usual = build_metric(key)
        if not isinstance(found.setdefault(key, usual), type(usual)):
            raise ConfigError(f"The field {key!r} must hold gradveil's own metric, got another. Rename your class.")
    ordered = [found[key] for key in dict.fromkeys([*STANDARD, *found])]
    columns = [replace(column, shown=column.key in asked) for column in map(metric_column, ordered)]
    base = Schema(rows.COLUMNS)
    taken = {column.key for column in (*base.columns, *map(rows.blind_column, columns))} - {*STANDARD}
    clash = next((column.key for column in columns if column.key in taken), None)
    if clash:
        raise ConfigError(f"A metric's field must be new, got {clash!r}, which rows have. Rename the metric's class.")
    return base.with_metrics(columns)
