"""Guesses of an attack as a notebook shows them: a line of small pictures per target."""

import base64
import io
from html import escape

import torch
from PIL import Image
from torch import Tensor

from gradveil.data.pixels import to_bytes

TARGETS, IMAGES = 8, 16
"""Targets, and images of each, that are shown at most."""


def guesses_html(images: Tensor, loss: Tensor, converged: Tensor) -> str:
    """Return a table of pictures (T, B, C, H, W) with the attacker's loss; a guess that is missing is a grey square."""
    lines = ""
    for target, batch in enumerate(images[:TARGETS]):
        data = base64.b64encode(picture(batch[:IMAGES])).decode()
        state = "converged" if bool(converged[target]) else "did not converge"
        lines += (
            f"<tr><td>target {target}</td><td><img alt='guesses of target {target}' "
            f"style='height:48px;image-rendering:pixelated' src='data:image/png;base64,{data}'></td>"
            f"<td>loss {float(loss[target]):.4g}, {escape(state)}</td></tr>"
        )
    more = f"<p>and {len(images) - TARGETS} more targets</p>" if len(images) > TARGETS else ""
    return f"<table><tbody>{lines}</tbody></table>{more}"


def picture(batch: Tensor) -> bytes:
    """Return images (B, C, H, W) in [0, 1] side by side as a PNG; NaN becomes grey, other channels than 1 or 3 a mean.

    Example:
        >>> picture(torch.zeros(2, 1, 4, 4))[1:4]
        b'PNG'
    """
    shown = batch.detach().cpu().float().nan_to_num(0.5).clamp(0, 1)
    if shown.shape[1] not in (1, 3):
        shown = shown.mean(1, keepdim=True)
    line = to_bytes(torch.cat(list(shown), 2)).permute(1, 2, 0)  # (H, B W, C)
    buffer = io.BytesIO()
    Image.fromarray(line.squeeze(2).numpy() if line.shape[2] == 1 else line.numpy()).save(buffer, "png")
    return buffer.getvalue()
