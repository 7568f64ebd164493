"""Filters for NVFlare, by the names that its JSON files use; see docs/nvflare.md. Needs ``gradveil[nvflare]``.

`Protect` and `Remember` belong into a site's ``privacy.json``, `Tap` into the server's filters.
"""

from gradveil.engines.nvflare_filters import Protect, Remember
from gradveil.runs.nvflare_tap import NvflareTap as Tap

__all__ = ["Protect", "Remember", "Tap"]
