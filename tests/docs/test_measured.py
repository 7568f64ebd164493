"""Tables of the manual that benchmarks generate are those of their result files."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def generated(benchmark, result, page, function="table"):
    """Return a page, what it must contain, and the benchmark's figures."""
    path = ROOT / "benchmarks" / f"{benchmark}.py"
    spec = importlib.util.spec_from_file_location(benchmark, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    document = json.loads((ROOT / "results" / f"{result}.json").read_text())
    text = (ROOT / "docs" / page).read_text()
    return text, [getattr(module, function)(document), document["command"], document["date"]], document


def test_the_gain_of_learned_priors_in_noise_is_the_measured_one():
    page, wanted, document = generated("noise_priors", "noise-priors", "attacks.md")
    assert [text for text in wanted if text not in page] == []
    psnr = {(row["std"], row["prior"]): row["psnr"] for row in document["figures"]}
    assert psnr[0.1, "denoiser"] > psnr[0.1, "smooth"] + 2  # "wins by far"
    assert abs(psnr[0.5, "denoiser"] - psnr[0.5, "normal"]) < 1  # "no better"
