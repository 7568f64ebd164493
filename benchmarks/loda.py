"""Time LODA's obscuring of images in batches and one at a time, in one run.

The extractor is a resnet20 of the given width with random weights (they do not affect the time); images are random,
3x32x32. All steps of an image take equally long, so only some are timed, and the time is scaled to all steps. The
contenders take turns. CPU time is given beside the wall-clock time, because other load on the machine affects it less.

- plain loop: Algorithm 1 as written, one image at a time, with `backward` through the whole network;
- batch 1: the defence on one image at a time: layers after the last feature do not run, and only the image has a
  gradient;
- batch N: the defence on N images at once.

    python benchmarks/loda.py [--layers first-5] [--batches 1,16,64] [--steps 20] [--rounds 3] [--width 16]
                              [--all-steps 500] [--threads 1] [--json FILE]
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil import create_model
from gradveil.defences.loda import Loda
from gradveil.storage import save_tensors

SHAPE = (3, 32, 32)


def plain_loop(network: nn.Module, names: list[str], image: Tensor, begun: Tensor, steps: int, c: float) -> Tensor:
    """Run Algorithm 1 on one image (1, C, H, W), with hooks and `backward`."""
    found: list[Tensor] = []
    hooks = [
        network.get_submodule(name).register_forward_hook(lambda layer, inputs, output: found.append(output))
        for name in names
    ]
    network(image)
    wanted = [output.detach() for output in found]
    x = begun.clone()
    for _ in range(steps):
        found.clear()
        x.requires_grad_()
        network(x)
        loss = sum(((a - b) ** 2).mean() for a, b in zip(found, wanted, strict=True)) - c * ((x - image) ** 2).mean()
        loss.backward()
        x = (x.detach() - 0.1 * x.grad / x.grad.norm()).clamp(0, 1)
    for hook in hooks:
        hook.remove()
    return x


def main() -> None:
    """Time all contenders and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="first-5")
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--all-steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sizes = [int(size) for size in given.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        spec = f"resnet20:width={given.width}"
        save_tensors(path, create_model(spec, SHAPE, 10, 0).state_dict())
        defence = Loda(extractor=spec, weights=str(path), classes=10, layers=given.layers, steps=given.steps)
        features = defence.features(create_model("lenet-dlg", SHAPE, 10, 0), SHAPE)
    images, begun = torch.rand(2, max(sizes), *SHAPE, generator=torch.Generator().manual_seed(0)).unbind()
    defence.obscured(features, images[: min(sizes)], begun[: min(sizes)])  # warm-up
    whole = copy.deepcopy(features.network).requires_grad_(True).to(memory_format=torch.contiguous_format)
    by_hand = plain_loop(whole, features.names, images[:1], begun[:1], given.steps, defence.c)
    off = float((by_hand - defence.obscured(features, images[:1], begun[:1])).abs().max())
    names = ["plain loop", *(f"batch {size}" for size in sizes)]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(given.rounds):
        for name, size in zip(names, [1, *sizes], strict=True):
            clock, processor = time.perf_counter(), time.process_time()
            if name == "plain loop":
                plain_loop(whole, features.names, images[:1], begun[:1], given.steps, defence.c)
            else:
                defence.obscured(features, images[:size], begun[:size])
            spent = time.perf_counter() - clock, time.process_time() - processor
            seconds[name].append((spent[0] / size, spent[1] / size))
    scale = given.all_steps / given.steps
    rows = []
    for name, times in seconds.items():
        clock, processor = (scale * statistics.median(pair[kind] for pair in times) for kind in (0, 1))
        rows.append({"contender": name, "images_a_second": 1 / clock, "images_a_processor_second": 1 / processor})
    print(f"{given.layers}, {given.all_steps} steps, {given.threads} threads; the loop differs by at most {off:.1e}")
    for row in rows:
        ratio = row["images_a_processor_second"] / rows[0]["images_a_processor_second"]
        print(
            f"{row['contender']:10s}: {row['images_a_second']:.3f} images/s, "
            f"{row['images_a_processor_second']:.3f} per CPU second, {ratio:.1f} x"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
