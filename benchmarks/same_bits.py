"""Check that a change of the code leaves seeded results unchanged to the last bit.

Run it before the change with ``--write``, and after it with ``--against``::

    python benchmarks/same_bits.py --write before.json
    python benchmarks/same_bits.py --against before.json

It runs short trainings and audits through the command line. Rows are compared without their times, weights and
images by their hashes. Fields that only the later version has are listed, but do not count as a difference.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TIMES = {"seconds", "round_seconds", "round_seconds_undefended", "overhead"}
SMALL = "--dataset mnist-5k --clients 3 --partition iid:images=40 --batch-size 8"
RUNS = {
    "train-none": f"train {SMALL} --model lenet5 --rounds 2 --sensitive 0.25",
    "train-batch-norm": f"train {SMALL} --model resnet20 --rounds 1 --batch-norm local",
    "train-entangle": f"train {SMALL} --model lenet-dlg --rounds 2 --defence entangle",
    "train-fedkl": f"train {SMALL} --model lenet5 --rounds 2 --defence fedkl",
    "train-dcs2": f"train {SMALL} --model lenet-dlg --rounds 1 --sensitive 0.1 --defence dcs2:steps=5",
    "train-chain": f"train {SMALL} --model mlp --rounds 2 --defence mixup+clip+gaussian:std=0.01",
    "train-fedsgd": f"train {SMALL} --model mlp --rounds 3 --algorithm fedsgd --defence dp-sgd --tripwire warn",
    "audit-matching": f"audit {SMALL} --model lenet-dlg --targets 3 --rounds 2 --adaptive --seed 1 "
    "--defences prune:fraction=0.7,gaussian:std=0.1,dp-sgd,soteria:probes=16,entangle,dcs2:steps=5,fedkl,precode,"
    "ca-fl,pogz,quantise,clip+laplace --attacks gs:iterations=40,dlg:iterations=6,linear",
    "audit-hidden": f"audit {SMALL} --model lenet-dlg --targets 2 --images 4 --looks 3 --rounds 2 --adaptive "
    "--defences mixup,instahide,ats --attacks gs:iterations=10,encodings "
    "--knows labels,num-examples,encodings,public-data",
    "audit-local": f"audit {SMALL} --model lenet-dlg --targets 2 --protocol fedavg --rounds 2 --adaptive "
    "--defences clip --attacks gs:iterations=10,grnn:iterations=5 --knows labels,num-examples,local-steps",
    "audit-malicious": f"audit {SMALL} --model mlp --targets 2 --images 4 --rounds 5 "
    "--attacks imprint,trap-weights,boundary --knows num-examples,alters-model,public-data",
    "score": "score --dataset mnist-5k --model mlp --defences gaussian:std=0.01,soteria:probes=16 --targets 1",
}


def play(name: str, command: str, folder: Path) -> dict[str, Any]:
    """Run one command and return what must not change: its rows, and the hashes of the files that it wrote."""
    words = command.split()
    out = [] if words[0] == "score" else ["--out", str(folder / name)]
    called = [sys.executable, "-m", "gradveil.cli", *words, *out, "--json"]
    done = subprocess.run(called, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    rows = [{key: value for key, value in row.items() if key not in TIMES} for row in json.loads(done.stdout)["rows"]]
    files = [*(folder / name).glob("model.safetensors"), *(folder / name).glob("cells/*.safetensors")]
    hashes = {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files)}
    return {"rows": rows, "files": hashes}


def differences(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Return the differences, and the names of new fields. A reworded ``why`` is text for people, and no difference."""
    changed, new = [], set[str]()
    if before["files"] != after["files"]:
        changed.append("files differ")
    if len(before["rows"]) != len(after["rows"]):
        changed.append(f"{len(before['rows'])} rows became {len(after['rows'])}")
    for number, (old, now) in enumerate(zip(before["rows"], after["rows"], strict=False)):
        new |= now.keys() - old.keys()
        changed += [
            f"row {number}, {key}: {value!r} became {now.get(key, 'nothing')!r}"
            for key, value in old.items()
            if now.get(key, "nothing") != value and not (key == "why" and value and now.get(key))
        ]
    return changed, new


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return the number of rows and files of a run, and one hash of all of them."""
    whole = json.dumps(found, sort_keys=True).encode()
    return {"rows": len(found["rows"]), "files": len(found["files"]), "sha256": hashlib.sha256(whole).hexdigest()}


def about(versions: str) -> dict[str, str]:
    """Return what a file of results states about its making."""
    day = datetime.now(tz=UTC).date().isoformat()
    return {"command": "python benchmarks/same_bits.py --against before.json", "date": day, "versions": versions}


def main() -> None:
    """Run the commands, and write or compare their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="File to write the results to.")
    parser.add_argument("--against", type=Path, help="File with the results of an earlier version.")
    parser.add_argument("--result", type=Path, help="File for the verdicts, in the form of results/*.json.")
    parser.add_argument("--versions", default="", help="With --result: both versions compared, BEFORE..AFTER.")
    parser.add_argument("--only", default="", help=f"Names of runs, separated by commas: {', '.join(RUNS)}.")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(RUNS)
    earlier = json.loads(options.against.read_text()) if options.against else {}
    found, verdicts, differ = {}, {}, False
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            found[name] = play(name, RUNS[name], Path(folder))
            count = f"{len(found[name]['rows'])} rows, {len(found[name]['files'])} files"
            changed, new = differences(earlier[name], found[name]) if name in earlier else ([], set())
            verdict = "" if name not in earlier else "CHANGED" if changed else "the same"
            print(f"{name}: {count} {verdict}{f'; new fields: {sorted(new)}' if new else ''}", flush=True)
            print(*[f"  {line}" for line in changed[:10]], sep="\n", end="\n" if changed else "")
            verdicts[name] = {"command": RUNS[name], "verdict": verdict, "new_fields": sorted(new)} | summary(
                found[name]
            )
            differ |= bool(changed)
    if options.write:
        options.write.write_text(json.dumps(found, indent=1))
    if options.result:
        options.result.write_text(json.dumps(about(options.versions) | {"runs": verdicts}, indent=1) + "\n")
    sys.exit(differ)


if __name__ == "__main__":
    main()
