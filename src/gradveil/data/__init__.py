"""Private data and how it is divided among clients: named sets, the user's own, and partitions."""

from gradveil.data.checks import verify
from gradveil.data.datasets import Dataset, NamedSet, Split, data_root, load_dataset
from gradveil.data.partition import Partition, mark_sensitive

__all__ = ["Dataset", "NamedSet", "Partition", "Split", "data_root", "load_dataset", "mark_sensitive", "verify"]
