"""What an NVFlare server sees of two real sites (POC mode: processes and TLS), one of which protects its updates.

Only site-1 has a ``local/privacy.json`` with gradveil's filters; the job knows nothing of it. The server's tap stores
every update; the file gets the share of zeros in each of them. Run in an environment with ``gradveil[nvflare]``:

    python benchmarks/nvflare_poc.py --out results/nvflare-poc.json
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nvflare_simulator import ROUNDS, SCRIPT, SITES, zeros

DEFENCE, PROTECTED = "prune:fraction=0.9", "site-1"


def privacy(private: Path) -> dict[str, Any]:
    """Return a site's privacy policy, as in docs/nvflare.md, with a private folder."""
    protect = {"path": "gradveil.nvflare.Protect", "args": {"defence": DEFENCE, "folder": str(private)}}
    scope = {
        "name": "protected", "task_data_filters": [{"path": "gradveil.nvflare.Remember", "args": {}}],
        "task_result_filters": [protect],
    }  # fmt: skip
    return {"scopes": [scope], "default_scope": "protected"}


def play(folder: Path) -> list[dict[str, object]]:
    """Run a job with real processes, and return the share of zeros in each update that the server saw."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import PocEnv, poc_env

    from gradveil.nvflare import Tap
    from nvflare_net import IMAGES, LR, Net

    start = poc_env._start_poc

    def with_policy(**options: object) -> None:
        (local,) = (folder / "poc").rglob(f"{PROTECTED}/local")
        (local / "privacy.json").write_text(json.dumps(privacy(folder / "private")))
        start(**options)

    poc_env._start_poc = with_policy
    recipe = FedAvgRecipe(name="digits", min_clients=SITES, num_rounds=ROUNDS, model=Net(), train_script=str(SCRIPT))
    taps = [Tap(str(folder / "tap"), "lenet-dlg", [1, 28, 28], 10, LR, {"num_examples": IMAGES}) for _ in range(2)]
    recipe.add_server_output_filter(taps[0], tasks=["train"])
    recipe.add_server_input_filter(taps[1], tasks=["train"])
    env = PocEnv(num_clients=SITES)
    try:
        run = recipe.execute(env)
        print(run.get_status(), run.get_result(timeout=600), flush=True)
    finally:
        env.stop()
    found = sorted(folder.glob("tap/round-*/site-*.safetensors"))
    return [{"round": path.parent.name, "site": path.stem, "zeros": round(zeros(path), 4)} for path in found]


def table(document: dict[str, Any]) -> str:
    """Return the share of zeros in the updates that the server saw of each site."""
    lines = ["| site | its `local/privacy.json` | updates stored by the server | zeros in them |", "|---|---|---|---|"]
    for site in dict.fromkeys(row["site"] for row in document["rows"]):
        shares = [row["zeros"] for row in document["rows"] if row["site"] == site]
        spread = sorted({f"{100 * share:.1f} %" for share in shares})
        policy = f"`{DEFENCE}`" if site == PROTECTED else "none"
        lines.append(f"| {site} | {policy} | {len(shares)} | {' to '.join(spread)} |")
    return "\n".join(lines)


def main() -> None:
    """Play the job and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.absolute()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "home").mkdir()
        os.environ |= {
            "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "NVFLARE_POC_WORKSPACE": str(folder / "poc"), "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        rows = play(folder)
    result = {
        "command": "python benchmarks/nvflare_poc.py --out results/nvflare-poc.json",
        "date": datetime.now(UTC).date().isoformat(),
        "seeds": [0],
        "versions": {name: version(name) for name in ("nvflare", "torch")} | {"python": platform.python_version()},
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
