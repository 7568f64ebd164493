"""The audit: every attack against every defence, and what each defence costs, as rows."""

from gradveil.audits.run import AuditResult, audit
from gradveil.audits.settings import AuditSettings, make_audit_settings

__all__ = ["AuditResult", "AuditSettings", "audit", "make_audit_settings"]
