"""An extension of griffe, which reads docstrings for the Python reference: formulas and code as Markdown."""

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parents[1]))
from website.maths import markdown


class MathInDocstrings(griffe.Extension):
    """Turn the reStructuredText of our docstrings into Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:  # noqa: ANN401 - what griffe passes
        """Change one object's docstring."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
