"""The membership cell of an audit: whether a server tells a client's training images from others."""

from pathlib import Path

from gradveil.attacks import MembershipAttack, build_any_attack
from gradveil.audit.plan import Cell, Rows, facts_of
from gradveil.audit.settings import AuditSettings
from gradveil.data import Dataset
from gradveil.errors import ConfigError
from gradveil.membership import infer_membership

MEMBERSHIP = (
    "kind", "defence", "attack", "seed", "round", "client", "auc", "tpr_at_1_fpr", "advantage", "auc_loss",
    "auc_confidence", "members", "non_members", "queries", "accuracy_members", "accuracy_non_members", "roc",
    "knows", "seconds", "why", "failed", "cell",
)  # fmt: skip


def membership_cell(cell: Cell, settings: AuditSettings, dataset: Dataset, root: Path | None = None) -> Rows:
    """Train under the defence; one row for each round in which a local model was attacked."""
    attack = build_any_attack(cell.attack)
    if not isinstance(attack, MembershipAttack):
        raise ConfigError(f"The attack must tell members from others here, got {cell.attack!r}, which rebuilds images.")
    training = settings.training(cell.defence, cell.seed)
    common = facts_of(cell) | {"knows": ["labels"], "failed": False}
    return [
        {key: (common | figures)[key] for key in MEMBERSHIP}
        for figures in infer_membership(training, attack, dataset=dataset, data_root=root)
    ]
