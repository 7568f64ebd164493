"""Search a real federation for private bytes: its traffic, the server's files, and the memory of its processes.

Three sites with images of their own train twice. In the first run the server gets single updates,
saves them, and so gives the bytes to look for; it is also the control, in which they must be found. In the second run,
with secure sums, none of them may be anywhere. Sites are `repeatable`, so that both runs begin with the same updates.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flower_kills import part_of, reached
from flower_processes import Processes, federation, has_rows, until
from gradveil.data import load_dataset
from gradveil.federated.secure_sum import Quantiser
from gradveil.storage import load_tensors

APP, SITES, PORT, WINDOW = Path("examples/flower"), 3, 8880, 48
BITS, RANGE = 22, 1.0
Patterns = dict[str, list[bytes]]


class Tee:
    """A TCP relay to the SuperLink that keeps every byte, in both directions."""

    def __init__(self, listen: int, to: int) -> None:
        self._kept, self._to = list[bytearray](), to
        self._socket = socket.create_server(("127.0.0.1", listen))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            here, _ = self._socket.accept()
            try:
                there = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                here.close()  # the SuperLink has ended
                continue
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        kept = bytearray()
        self._kept.append(kept)
        try:
            while piece := source.recv(1 << 16):
                kept += piece
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    @property
    def seen(self) -> list[bytes]:
        """Return what went over each connection in one direction."""
        return [bytes(kept) for kept in self._kept]


def windows(data: bytes, count: int, different: int = WINDOW // 2) -> list[bytes]:
    """Return some pieces of data with many different bytes, so that they occur nowhere by chance."""
    found, step = [], max(1, len(data) // 2000)
    for start in range(0, len(data) - WINDOW, step):
        piece = data[start : start + WINDOW]
        if len(set(piece)) > different:
            found.append(piece)
    return found[:: max(1, len(found) // count)][:count]


def deal(folder: Path) -> Patterns:
    """Give each site images of its own, and the server test images; return bytes of the sites' images."""
    found, patterns = load_dataset("mnist-5k"), list[bytes]()
    tests = {"x_test": found.test.images, "y_test": found.test.labels}
    for site in range(SITES):
        mine = slice(1000 * site, 1000 * site + 1000)
        images = found.train.images[mine]
        np.savez(folder / f"data-{site}.npz", x_train=images, y_train=found.train.labels[mine], **tests)
        patterns += windows(images[:99].tobytes(), 1, 16) + windows((images[:99] / np.float32(255)).tobytes(), 1, 16)
    np.savez(folder / "test.npz", x_train=found.train.images[-1:], y_train=found.train.labels[-1:], **tests)
    return {"images": patterns}


def of_updates(folder: Path) -> Patterns:
    """Return bytes of each site's update in the first round: as sent, as weights, and quantised without a mask."""
    start, found = load_tensors(folder / "model.safetensors"), Patterns()
    for site in range(SITES):
        update = load_tensors(folder / f"update-{site}.safetensors")
        flat, codes = bytearray(), Quantiser(BITS, RANGE)
        for name in sorted(update):
            flat += codes.encode(update[name].double() * (1 / SITES)).numpy().astype("<i4").tobytes()
            if update[name].numel() > 9999:  # large ones, as a search of memory takes a while
                trained = start[name] + update[name]
                found.setdefault("updates", []).extend(windows(update[name].numpy().tobytes(), 1))
                found.setdefault("trained weights", []).extend(windows(trained.numpy().tobytes(), 1))
        numbers = np.frombuffer(bytes(flat), "<i4")
        for kind in ("<i4", "<u8"):
            found.setdefault("quantised updates", []).append(numbers[1000 : 1000 + WINDOW // 4].astype(kind).tobytes())
    return found


def of_keys(folder: Path) -> Patterns:
    """Return secrets of the sites that no server may have, as bytes and as text."""
    texts = [(folder / f"site-{site}" / f"identity-{site}.key").read_text().strip() for site in range(SITES)]
    texts += [part_of(folder, site)[key] for site in range(SITES) for key in ("mask_secret", "share_secret")]
    return {"secret keys": [form for text in texts for form in (text.encode(), bytes.fromhex(text))]}


def hits(data: Iterable[bytes], patterns: Patterns) -> dict[str, int]:
    """Return how many patterns of each kind occur anywhere."""
    found: dict[str, set[bytes]] = {kind: set() for kind in patterns}
    for piece in data:
        for kind, forms in patterns.items():
            found[kind] |= {form for form in forms if form in piece}
    return {kind: len(forms) for kind, forms in found.items()}


def memory(pid: int) -> Iterator[bytes]:
    """Yield the readable and writable memory of a process."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        start, stop = (int(part, 16) for part in span.split("-"))
        if rights.startswith("rw") and "[v" not in line:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
                try:
                    file.seek(start)
                    yield file.read(stop - start)
                except (OSError, OverflowError):
                    continue


def files(folder: Path, out: Path) -> Iterator[bytes]:
    """Yield the server's files: the SuperLink's state and log, and what the run wrote."""
    for path in [*folder.glob("state.db*"), folder / "link.log", *(p for p in out.rglob("*") if p.is_file())]:
        yield path.read_bytes()


def searched_memory(all_: Processes, patterns: Patterns) -> dict[str, Any]:
    """Stop the server's processes, search their memory, and let them go on."""
    pids = [all_.running["link"].pid, *all_.of_link("flwr-serverapp")]
    found, size = dict.fromkeys(patterns, 0), 0
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for pid in pids:
            pieces = list(memory(pid))
            size += sum(map(len, pieces))
            for kind, count in hits(pieces, patterns).items():
                found[kind] = max(found[kind], count)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    return {"found": found, "MiB": size >> 20, "processes": len(pids)}


def search(folder: Path, save: Callable[[Any], None], _most: int) -> None:
    """Play both runs, and count what was found where."""
    folder.mkdir(parents=True)
    images = deal(folder)
    shared = {
        "dataset": str(folder / "test.npz"), "model": "lenet5", "defence": "clip:norm=1000", "clients": SITES,
        "seed": 0,
    }  # fmt: skip
    found = dict[str, Any]()
    with federation(folder / "control", PORT, SITES, _policy(folder), by_way_of=PORT + 5) as all_:
        tee, out = Tee(PORT + 5, PORT), folder / "control" / "run"
        all_.run(APP, out, {**shared, "rounds": 2, "save-rounds": "1"})
        until("round 1 is saved", has_rows, out, 1)
        updates = of_updates(out / "rounds" / "000001")
        in_memory = searched_memory(all_, updates | images)
        run = all_.running["run-run"]
        run.wait(300)
        found["single updates"] = {
            "traffic": hits(tee.seen, updates | images), "traffic MiB": sum(map(len, tee.seen)) >> 20,
            "files": hits(files(all_.folder, out), updates | images), "memory": [in_memory],
        }  # fmt: skip
        save({"patterns": {kind: len(forms) for kind, forms in (updates | images).items()}, "runs": found})
    with federation(folder / "secure", PORT + 40, SITES, _policy(folder), by_way_of=PORT + 45) as all_:
        tee, out = Tee(PORT + 45, PORT + 40), folder / "secure" / "run"
        sums = {"aggregation": "secure", "sum-bits": BITS, "sum-range": RANGE}
        run = all_.run(APP, out, {**shared, **sums, "rounds": 2})
        until("the last site opens the sum", reached, all_.folder, SITES - 1, [1], "opening")
        looks = [searched_memory(all_, updates | images | of_keys(all_.folder))]
        until("round 1 is saved", has_rows, out, 1)
        looks.append(searched_memory(all_, updates | images | of_keys(all_.folder)))
        run.wait(300)
        time.sleep(1)
        everything = updates | images | of_keys(all_.folder)
        found["secure sums"] = {
            "traffic": hits(tee.seen, everything), "traffic MiB": sum(map(len, tee.seen)) >> 20,
            "files": hits(files(all_.folder, out), everything), "memory": looks,
        }  # fmt: skip
        save({"patterns": {kind: len(forms) for kind, forms in everything.items()}, "runs": found})


def _policy(folder: Path) -> str:
    return f"data='{folder}/data-$NUMBER.npz' defence='clip:norm=1000' repeatable=true sensitive='none'"


def bytes_table(figures: Mapping[str, Any]) -> str:
    """Return how many of the pieces were found where."""
    lines = ["| run | pieces of | looked for | found in traffic | in the server's files | in the server's memory |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, run in figures["runs"].items():
        for kind, count in run["traffic"].items():
            most = max(look["found"].get(kind, 0) for look in run["memory"])
            lines.append(f"| {name} | {kind} | {figures['patterns'][kind]} | {count} | {run['files'][kind]} | {most} |")
    return "\n".join(lines)


PLAY = {"bytes": search}
TABLES = {"bytes": bytes_table}
