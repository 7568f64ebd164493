"""What an NVFlare server sees in NVFlare's simulator, with and without gradveil's filters at the sites.

Two sites train for two rounds. The server's tap stores every update; the file gets the share of zeros in each of them.
`prune` leaves one entry in ten, so that the share tells whether the filter worked.

    python benchmarks/nvflare_simulator.py --out results/nvflare.json
"""

import argparse
import json
import os
import platform
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gradveil.storage import load_tensors

SITES, ROUNDS, SCRIPT = 2, 2, Path(__file__).with_name("nvflare_net.py")


def zeros(path: Path) -> float:
    """Return the share of zeros in an update."""
    tensors = load_tensors(path).values()
    return sum(int(t.eq(0).sum()) for t in tensors) / sum(t.numel() for t in tensors)


def play(defence: str, folder: Path) -> list[dict[str, object]]:
    """Run a job, and return the share of zeros in each update that the server saw."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    from gradveil.nvflare import Protect, Remember, Tap
    from nvflare_net import IMAGES, LR, Net

    model = Net()
    recipe = FedAvgRecipe(name="digits", min_clients=SITES, num_rounds=ROUNDS, model=model, train_script=str(SCRIPT))
    if defence != "none":
        recipe.add_client_input_filter(Remember(), tasks=["train"])
        recipe.add_client_output_filter(Protect(defence), tasks=["train"])
    taps = [Tap(str(folder / "tap"), "lenet-dlg", [1, 28, 28], 10, LR, {"num_examples": IMAGES}) for _ in range(2)]
    recipe.add_server_output_filter(taps[0], tasks=["train"])
    recipe.add_server_input_filter(taps[1], tasks=["train"])
    recipe.execute(SimEnv(num_clients=SITES, num_threads=SITES, workspace_root=str(folder / "workspace")))
    found = sorted(folder.glob("tap/round-*/site-*.safetensors"))
    return [
        {"defence": defence, "round": path.parent.name, "site": path.stem, "zeros": round(zeros(path), 4)}
        for path in found
    ]


def table(document: dict[str, Any]) -> str:
    """Return the share of zeros in the updates that the server saw, as a table."""
    lines = ["| filter of the sites | updates stored by the server | zeros in them |", "|---|---|---|"]
    for defence in dict.fromkeys(row["defence"] for row in document["rows"]):
        shares = [row["zeros"] for row in document["rows"] if row["defence"] == defence]
        spread = sorted({f"{100 * share:.1f} %" for share in shares})
        lines.append(f"| `{defence}` | {len(shares)} | {' to '.join(spread)} |")
    return "\n".join(lines)


def main() -> None:
    """Play both jobs and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.absolute()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    rows = []
    for defence in ("none", "prune:fraction=0.9"):
        with tempfile.TemporaryDirectory() as folder:
            rows += play(defence, Path(folder))
    result = {
        "command": "python benchmarks/nvflare_simulator.py --out results/nvflare.json",
        "date": datetime.now(UTC).date().isoformat(),
        "seeds": [0],
        "versions": {name: version(name) for name in ("nvflare", "torch")} | {"python": platform.python_version()},
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
