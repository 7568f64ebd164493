"""Pages of the notebooks in examples/notebooks, with the outputs that are saved in them."""

import base64
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def pages() -> dict[str, str]:
    """Return the Markdown of each notebook by its path on the site."""
    return {f"notebooks/{path.stem}.md": page(json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.ipynb"))}


def page(notebook: dict[str, Any]) -> str:
    """Return one notebook's Markdown: text, code, and what the code showed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", *map(_output, cell["outputs"])]
    return "\n\n".join(filter(None, parts)) + "\n"


def _output(output: dict[str, Any]) -> str:
    """Return what one output shows, in its richest form."""
    if output["output_type"] == "stream":
        return f"```\n{''.join(output['text']).strip()}\n```" if output["name"] == "stdout" else ""
    data = output.get("data", {})
    if "text/html" in data:
        lines = [line.strip() for line in "".join(data["text/html"]).split("\n")]
        shown = re.sub(r"<a [^>]*>(.*?)</a>", r"<code>\1</code>", "".join(lines))  # the run's folder is not here
        return f'<div class="output">{shown}</div>'
    if "image/png" in data:
        picture = base64.b64encode(base64.b64decode("".join(data["image/png"]))).decode()
        return f'<img class="output" alt="Figure of the cell above" src="data:image/png;base64,{picture}">'
    return f"```\n{''.join(data.get('text/plain', ''))}\n```" if "text/plain" in data else ""
