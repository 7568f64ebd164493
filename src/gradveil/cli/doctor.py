"""The command that says what this machine has, and what each missing part is for."""

import typer

from gradveil.cli.display import DataRoot, Json, print_json, show


def doctor_command(data_root: DataRoot = None, as_json: Json = False) -> None:
    """Say what is installed and found: versions, data, browser, compiler, Flower. Changes nothing.

    Exit code 1 if something is wrong that gradveil can't work without.
    """
    import dataclasses

    from rich.table import Table

    from gradveil.runs.doctor import examine

    findings = examine(data_root)
    healthy = all(finding.state != "wrong" for finding in findings)
    if as_json:
        print_json({"healthy": healthy, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        table = Table("what", "state", "found", "what to do, or what it is for")
        for finding in findings:
            table.add_row(finding.what, finding.state, finding.detail, finding.advice)
        show(table)
    if not healthy:
        raise typer.Exit(1)
