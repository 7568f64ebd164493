"""The command that scores defences without any attack."""

import contextlib
import sys
from typing import Annotated

import typer

from gradveil.cli.display import DataRoot, Json, bar, figure, print_json, show


def score_command(  # noqa: PLR0913 - its arguments are the options of the command
    dataset: Annotated[str, typer.Option(help="A named set, a .npz file or a folder of pictures.")] = "mnist-5k",
    model: Annotated[str, typer.Option(help="A model of the zoo or your own file.py:factory.")] = "lenet-dlg",
    defences: Annotated[str, typer.Option(help="Defences, a list a,b:key=value; a+b chains two.")] = "none",
    targets: Annotated[int, typer.Option(help="Number of images to score, one per update.")] = 4,
    knows: Annotated[str, typer.Option(help="What attackers know in addition to the defence.")] = "labels,num-examples",
    weights: Annotated[str, typer.Option(help="Weights of the model (safetensors); by default random.")] = "",
    normalise: Annotated[str, typer.Option(help="Input normalisation, as in audit.")] = "dataset",
    aux: Annotated[str, typer.Option(help="Data set of public images, for defences that use them.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the model, the targets and the defences.")] = 0,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Bound what any attacker could recover of single images, without attacking: the best possible mean PSNR.

    The bound is of first order, for attackers who know the defence, the label and the variance of pixels, and nothing
    else about images.
    """
    from rich.table import Table

    from gradveil.audits.settings import make_audit_settings
    from gradveil.runs.score import score, summarise_scores

    given = {"dataset": dataset, "model": model, "defences": defences, "targets": targets, "knows": knows}
    given |= {"weights": weights, "normalise": normalise, "aux": aux, "seed": seed}
    settings = make_audit_settings({**given, "rounds": 0, "adaptive": True})
    with bar("") as move, contextlib.redirect_stdout(sys.stderr):
        rows = score(settings, data_root=data_root, progress=lambda share, doing: move(share, 1.0, doing))
    lines = summarise_scores(rows)
    if as_json:
        print_json({"summary": lines, "rows": rows})
        return
    heads = ("defence", "PSNR at best", "PSNR of a blind guess", "directions seen", "bits", "why not")
    table = Table(*heads, title=f"{settings.model} on {settings.dataset}, one image an update", title_justify="left")
    for line in lines:
        seen = "-" if line["seen"] is None else f"{line['seen']:.0f} of {line['directions']:.0f}"
        best, blind = (figure(line[key], ".1f") for key in ("psnr_cap", "psnr_unseen"))
        table.add_row(line["defence"], best, blind, seen, figure(line["bits"], ",.0f"), line["why"])
    show(table)
