"""Folders like those of an audit, made without any attack: guesses are mixtures of the true images and noise."""

import json
from dataclasses import dataclass, field

import tomli_w
import torch

from gradveil.metrics.mse import Mse
from gradveil.metrics.psnr import Psnr
from gradveil.metrics.ssim import Ssim
from gradveil.storage import save_tensors

STEPS = (0, 50, 200, 500, 1000)


@dataclass
class Made:
    """The content to make: the share of the truth that each (defence, adaptive) reveals, and the cost of training."""

    let_through: dict = field(
        default_factory=lambda: {
            ("none", False): 0.97,
            ("prune:fraction=0.7", False): 0.35,
            ("prune:fraction=0.7", True): 0.85,
        }
    )
    accuracy: dict = field(default_factory=lambda: {"none": 0.969, "prune:fraction=0.7": 0.951})
    attacks: tuple = ("gs:iterations=1000",)
    seeds: tuple = (0,)
    targets: int = 4
    images: int = 1
    truth: torch.Tensor | None = None
    cell_size: int = 1000
    iterates: bool = True
    settings: dict = field(default_factory=dict)

    def write(self, folder):
        """Write the folder and return it."""
        (folder / "cells").mkdir(parents=True)
        self.rng = torch.Generator().manual_seed(0)
        shape = (self.targets, self.images, 1, 16, 16)
        truth = torch.rand(shape, generator=self.rng).round() if self.truth is None else self.truth
        labels = torch.arange(self.targets * self.images).view(self.targets, self.images) % 10
        save_tensors(folder / "truth.safetensors", {"images": as_bytes(truth), "labels": labels})
        (folder / "settings.toml").write_bytes(tomli_w.dumps(self.all_settings()).encode())
        rows, plan = [], []
        for (defence, adaptive), share in self.let_through.items():
            for attack in self.attacks:
                for seed in self.seeds:
                    for first in range(0, self.targets, self.cell_size):
                        targets = range(first, min(self.targets, first + self.cell_size))
                        name = f"{len(plan):03d}"
                        what = {"defence": defence, "attack": attack, "adaptive": adaptive, "seed": seed}
                        plan.append({"name": name, "kind": "privacy", **what, "targets": [first, targets.stop]})
                        own = self.cell(folder, name, what, truth, labels, targets, share)
                        (folder / "cells" / f"{name}.json").write_text(json.dumps(own))
                        rows += own
        for defence, accuracy in self.accuracy.items():
            for seed in self.seeds:
                name = f"{len(plan):03d}"
                plan.append({"name": name, "kind": "utility", "defence": defence, "seed": seed, "attack": ""})
                own = [utility_row(defence, accuracy + 0.001 * seed, seed=seed)]
                (folder / "cells" / f"{name}.json").write_text(json.dumps(own))
                rows += own
        (folder / "plan.json").write_text(json.dumps({"cells": plan}))
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    def all_settings(self):
        return {
            "kind": "audit",
            "dataset": "mnist-5k",
            "model": "lenet-dlg",
            "defences": list(dict.fromkeys(defence for defence, _ in self.let_through)),
            "attacks": list(self.attacks),
            "adaptive": any(adaptive for _, adaptive in self.let_through),
            "seeds": list(self.seeds),
            "targets": self.targets,
            "images": self.images,
            "knows": ["labels", "num-examples"],
            "rounds": 20,
            "clients": 10,
        } | self.settings

    def cell(self, folder, name, what, truth, labels, targets, share):
        """Write the images of one cell and return its rows."""
        own = truth[targets.start : targets.stop]
        noise = torch.rand(own.shape, generator=self.rng)
        mix = share * (1 - 0.3 * torch.rand(len(own), 1, 1, 1, 1, generator=self.rng) ** 3)
        ways = [(mix * (step / STEPS[-1]) ** 0.5) for step in STEPS]
        pictures = torch.stack([way * own + (1 - way) * noise for way in ways])
        guess = pictures[-1]
        save_tensors(
            folder / "cells" / f"{name}.safetensors",
            {
                "images": as_bytes(guess),
                "guessed": torch.ones(guess.shape[:2], dtype=torch.uint8),
                "iterates": as_bytes(pictures if self.iterates else pictures[:0]),
                "labels": labels[targets.start : targets.stop],
                "steps": torch.tensor(STEPS if self.iterates else (), dtype=torch.int64),
            },
        )
        knows = ["labels", "num-examples", "defence"] if what["adaptive"] else ["labels", "num-examples"]
        return [
            privacy_row(
                **what,
                target=target,
                mse=float(Mse()(true, shown).mean()),
                psnr=float(Psnr()(true, shown).mean()),
                ssim=float(Ssim()(true, shown).mean()),
                converged=bool(share > 0.5),
                knows=knows,
                cell=name,
            )
            for target, true, shown in zip(targets, own, guess, strict=True)
        ]


def privacy_row(defence="none", attack="gs", **more):
    return {
        "kind": "privacy", "defence": defence, "attack": attack, "adaptive": False, "seed": 0, "target": 0, "mse": 0.01,
        "psnr": 20.0, "ssim": 0.6, "lpips": None, "label_accuracy": 1.0, "converged": True, "attacker_loss": 0.001,
        "knows": ["labels"], "epsilon": None, "delta": None, "seconds": 1.5, "why": "lpips: no weights",
        "failed": False, "cell": "",
    } | more  # fmt: skip


def utility_row(defence="none", accuracy=0.969, **more):
    return {
        "kind": "utility", "defence": defence, "seed": 0, "accuracy": accuracy, "accuracy_sensitive": None,
        "round_seconds": 0.5, "overhead": 1.0, "rounds": 20, "epsilon": None, "delta": None, "why": "", "failed": False,
        "seconds": 10.0,
    } | more  # fmt: skip


def as_bytes(images):
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)
