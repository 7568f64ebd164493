"""The command that scores defences without any attack."""

import contextlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gradveil.cli.completion import completion_of
from gradveil.cli.display import DataRoot, Json, bar, figure, print_json, show


def score_command(  # noqa: PLR0913 - its arguments are the options of the command
    dataset: Annotated[
        str,
        typer.Option(help="A named set, a .npz file or a folder of pictures.", autocompletion=completion_of("dataset")),
    ] = "mnist-5k",
    model: Annotated[
        str, typer.Option(help="A model of the zoo or your own file.py:factory.", autocompletion=completion_of("model"))
    ] = "lenet-dlg",
    defences: Annotated[
        str,
        typer.Option(help="Defences, a list a,b:key=value; a+b chains two.", autocompletion=completion_of("defences")),
    ] = "none",
    targets: Annotated[int, typer.Option(help="Number of updates to score; with --aggregation secure it is 1.")] = 4,
    images: Annotated[int, typer.Option(help="Images behind each client's update.")] = 1,
    aggregation: Annotated[
        str, typer.Option(help="What the server sees: none (each update) or secure (the clients' mean).")
    ] = "none",
    clients: Annotated[int, typer.Option(help="Number of clients; with --aggregation secure, those of the mean.")] = 10,
    knows: Annotated[str, typer.Option(help="What attackers know in addition to the defence.")] = "labels,num-examples",
    weights: Annotated[str, typer.Option(help="Weights of the model (safetensors); by default random.")] = "",
    normalise: Annotated[str, typer.Option(help="Input normalisation, as in audit.")] = "dataset",
    lr: Annotated[
        float, typer.Option(help="Learning rate of the clients' SGD; noise on updates hides more below 1.")
    ] = 0.05,
    batch_norm: Annotated[str, typer.Option(help="BatchNorm of the clients: average, local or freeze.")] = "average",
    aux: Annotated[str, typer.Option(help="Data set of public images, for defences that use them.")] = "",
    seed: Annotated[int, typer.Option(help="First seed, of the model, the targets and the defences.")] = 0,
    seeds: Annotated[int, typer.Option(help="Number of seeds: everything is repeated with seed, seed + 1, ...")] = 1,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:1, for the clients; scores are computed on the CPU.")
    ] = "cpu",
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Bound what any attacker could recover of an update's images, without attacking: the best possible mean PSNR.

    The bound is of first order. It is given for attackers who know the defence and the labels, and of images either
    the variance of pixels (white) or the covariance of public images.
    """
    given = dict(locals())
    from rich.table import Table

    from gradveil.runs.score import SCORED, score, score_settings, summarise_scores

    settings = score_settings({name: given[name] for name in SCORED})
    with bar("") as move, contextlib.redirect_stdout(sys.stderr):
        rows = score(settings, data_root=data_root, progress=lambda share, doing: move(share, 1.0, doing))
    lines = summarise_scores(rows)
    if as_json:
        print_json({"summary": lines, "rows": rows})
        return
    heads = ("defence", "PSNR at best", "white prior", "PSNR of a blind guess", "directions seen", "bits", "why not")
    title = f"{settings.model} on {settings.dataset}, {_behind(rows[0])}"
    table = Table(*heads, title=title, title_justify="left")
    for line in lines:
        seen = "-" if line["seen"] is None else f"{line['seen']:.0f} of {line['directions']:.0f}"
        best, white, blind = (figure(line[key], ".1f") for key in ("psnr_cap", "psnr_cap_white", "psnr_unseen"))
        table.add_row(line["defence"], best, white, blind, seen, figure(line["bits"], ",.0f"), line["why"])
    show(table)


def _behind(row: Mapping[str, Any]) -> str:
    images = "one image" if row["images"] == 1 else f"{row['images']} images"
    return f"{images} per update" if row["clients"] == 1 else f"{images} in the mean of {row['clients']} clients"
