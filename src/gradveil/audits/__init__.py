"""The audit: every defence against every attack, and what each defence costs, in rows."""

from gradveil.audits.run import AuditResult, audit
from gradveil.audits.settings import AuditSettings, make_audit_settings

__all__ = ["AuditResult", "AuditSettings", "audit", "make_audit_settings"]
