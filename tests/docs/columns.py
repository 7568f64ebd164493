"""The table of the summary's fields in docs/report.md, from the schema; `python -m tests.docs.columns` writes it."""

from pathlib import Path

from gradveil.metrics import schema_of

PAGE = Path(__file__).parents[2] / "docs" / "report.md"
BEGIN, END = "<!-- columns: python -m tests.docs.columns -->\n", "<!-- end of columns -->\n"
LEAK = {True: " (higher leaks more)", False: " (lower leaks more)", None: ""}


def guide():
    """Return the table: one line per field of summary.csv."""
    lines = ["| field | head on the page | meaning |", "|---|---|---|"]
    for column in schema_of().of("summary", "price"):
        head = column.head if column.shown else "-"
        lines.append(f"| `{column.key}` | {head} | {column.help}{LEAK[column.leakier]} |")
    return "\n".join([*lines, ""])


def written():
    """Return the table that the page has."""
    return PAGE.read_text().split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(BEGIN + written(), BEGIN + guide()))
