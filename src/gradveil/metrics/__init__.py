"""How close a guess is to the truth: metrics, one file each, and the matching of batches before scoring."""

from gradveil.metrics.base import Metric, MetricUnavailable
from gradveil.metrics.labels import label_accuracy
from gradveil.metrics.matching import align, match
from gradveil.metrics.scores import METRICS, score_targets

__all__ = ["METRICS", "Metric", "MetricUnavailable", "align", "label_accuracy", "match", "score_targets"]
