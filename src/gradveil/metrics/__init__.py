"""How close a guess is to the truth: metrics, one file each, and the matching of batches before scoring."""

from gradveil.metrics.base import Metric, MetricUnavailable
from gradveil.metrics.columns import build_metric, schema_of
from gradveil.metrics.labels import label_accuracy
from gradveil.metrics.matching import align, match
from gradveil.metrics.scores import score_targets

__all__ = [
    "Metric", "MetricUnavailable", "align", "build_metric", "label_accuracy", "match", "schema_of", "score_targets",
]  # fmt: skip
