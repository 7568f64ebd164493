"""The end of an audit's page: what the attacker knew, the command that repeats the run, and the method."""

import shlex
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

_KNOWLEDGE = {
    "labels": "the labels of the private images",
    "num-examples": "how many images the update was computed from",
    "local-steps": "the settings of local training",
    "defence": "the defence and its settings",
    "public-data": "public images of the same kind",
    "class-averages": "the mean image of each class",
    "batch-statistics": "mean and variance of the private batch at each BatchNorm",
    "private-state": "the client's private tensors, such as keys",
    "key": "the client's private key",
    "lock": "the client's lock layers and their change in the round",
}

METHOD = """<h3>How the figures are computed</h3>
<ul><li>Images are de-normalised and clamped to [0, 1]. The guesses of a batch are first matched to the truth by the
Hungarian assignment.</li>
<li>PSNR has peak 1, is computed from each image's own MSE, and is capped at 100 dB. SSIM uses an 11 × 11 Gaussian
window. LPIPS uses the AlexNet of its authors, on images in [-1, 1]; lower is closer.</li>
<li>Batches are scored image by image: the figures of a row are means over its images, and counts are of images.</li>
<li>The attacker chooses among iterates and restarts by its own loss, never by the truth.</li>
<li>The interval of a PSNR is the 95 % t interval of the seeds' means; one seed has none. The worst case is the largest
PSNR of any target. The PSNR below an intermediate picture, or one of a batch, is that of the picture as drawn.</li>
</ul>
<h3>What this does not promise</h3>
<ul><li>A picture that was not recovered here may be recovered by a better attack, or by the same attack with more
iterations: a figure is a lower bound of the leak. Only an ε is a guarantee.</li>
<li>Targets, model and training stage matter a lot; figures of one do not carry over to another.</li>
<li>Pictures do not show what an update reveals about labels, membership or properties of the data.</li></ul>"""


def command_of(settings: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> str:
    """Return the command line that repeats an audit: one option per setting that differs from its default.

    Example:
        >>> command_of({"kind": "audit", "dataset": "mnist-5k", "defences": ["none", "prune"], "adaptive": True})
        'gradveil audit --dataset mnist-5k --defences none,prune --adaptive --out DIR'
        >>> command_of({"tap": [1, 500]})
        'gradveil audit --tap 1/500 --out DIR'
    """
    pieces = ["gradveil", "audit"]
    for key, value in settings.items():
        if (
            key in ("kind", "command")
            or value is False
            or (defaults and key in defaults and _text(defaults[key]) == _text(value))
        ):
            continue
        option = f"--{key.replace('_', '-')}"
        text = _text(value)
        pieces += [option] if value is True else [f"{option}={text}"] if text.startswith("-") else [option, text]
    return shlex.join([*pieces, "--out", "DIR"])


def _text(value: object) -> str:
    if not isinstance(value, (list, tuple)):
        return str(value)
    return ("/" if value and all(isinstance(item, int) for item in value) else ",").join(map(str, value))


def knowledge(summary: Iterable[Mapping[str, Any]]) -> str:
    """Return what each attacker knew, grouped by knowledge."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for line in summary:
        name = f"{line['attack']}, knowing the defence" if line["adaptive"] else line["attack"]
        names = groups.setdefault(tuple(sorted(line["knows"])), [])
        if name not in names:
            names.append(name)
    always = "<p>Every attacker is the server: it knows the model that it sent and the update that it received.</p>"
    items = "".join(
        f"<li><b>{escape('; '.join(names))}</b>: also {escape(_words(knows))}.</li>" if knows else
        f"<li><b>{escape('; '.join(names))}</b>: nothing else.</li>"
        for knows, names in groups.items()
    )  # fmt: skip
    return f"{always}<ul>{items}</ul>" if items else f"{always}<p>No attack has finished yet.</p>"


def _words(knows: Iterable[str]) -> str:
    words = [_KNOWLEDGE.get(name, name) for name in knows]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
