"""What an update leaks, by figures that need no attack."""

from gradveil.leak.certificate import certificate, operator_norms

__all__ = ["certificate", "operator_norms"]
