"""The schema of rows: one place for every field, and an error for every other."""

import json
from dataclasses import fields

import pytest

from gradveil.metrics import Metric, build_metric, schema_of
from gradveil.registry import components
from gradveil.report.audit_folder import read_audit
from gradveil.report.summary import summarise, utility
from gradveil.rows import COLUMNS, Column, Schema, from_plain, to_plain
from tests.report.folders import Made, privacy_row, utility_row

NEW = Column("novelty", "number", "Novelty", "How new it is", "3", True, ("privacy", "summary"), mean=True)


@pytest.mark.parametrize("kind", ["privacy", "utility", "membership"])
def test_rows_have_the_columns_of_their_kind_no_more_and_no_less(kind):
    schema = schema_of()
    values = {column.key: 1 for column in schema.of(kind) if not column.later}
    row = schema.row(kind, values)
    assert list(row) == schema.keys(kind)
    assert all(row[column.key] is None for column in schema.of(kind) if column.later)
    with pytest.raises(ValueError, match=r"schema only, got 'psnrr'\. Add a Column to gradveil\.rows"):
        schema.row(kind, values | {"psnrr": 1})
    del values["seconds"]
    with pytest.raises(ValueError, match="must have all its fields, got none of: seconds"):
        schema.row(kind, values)


def test_a_line_of_a_row_with_an_unknown_field_is_an_error():
    with pytest.raises(ValueError, match="got 'psnrr'"):
        summarise([privacy_row(psnrr=1)])


def test_the_page_names_the_fields_that_it_does_not_know(tmp_path):
    folder = Made().write(tmp_path / "run")
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(privacy_row("other", future=1)) + "\n")
    audit = read_audit(folder)
    assert any(note.endswith("does not know are not shown: future.") for note in audit.notes)
    assert any(row["defence"] == "other" for row in audit.rows)


def test_rows_of_earlier_versions_are_read():
    old = {key: value for key, value in privacy_row().items() if key not in ("guessed", "countermove", "not_decoded")}
    row = schema_of().read(old)
    assert (row["guessed"], row["countermove"], row["psnr"], row["unmeasured"]) == (None, "", 20.0, None)
    assert schema_of().read(utility_row())["reports"] is None


def test_a_key_stands_in_a_table_once():
    with pytest.raises(ValueError, match="'novelty' twice in privacy"):
        Schema((*COLUMNS, NEW, NEW))


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: f"{column.key}-{'-'.join(column.tables)}")
def test_every_column_can_be_written_and_read(column):
    value = {"text": "a", "flag": True, "verdict": False, "texts": ["a", "b"], "numbers": [1.0], "mapping": {"A": 0.5},
             "number": 0.5, "index": 2}[column.type]  # fmt: skip
    line = {"n": 3, "images": 3, "psnr_low": None, "psnr_high": None} | {column.key: value}
    assert column.text(line)
    assert column.text({column.key: None}) == ""
    assert column.head
    assert column.tables


def test_what_a_metric_says_of_itself_is_what_its_column_says():
    for name, cls in components(Metric.kind).items():
        schema = schema_of([name])
        column = next(c for c in schema.metrics if c.key == (cls.field or name.replace("-", "_")))
        assert column.leakier is cls.higher_is_leakier
        assert column.help == cls.__doc__.splitlines()[0].rstrip(".")
        assert column in schema.of("privacy")
        assert from_plain(to_plain([column])) == (column,)
    assert build_metric("lpips").name == "lpips-alex"


def test_reports_of_a_defence_are_a_mapping_of_numbers():
    schema = schema_of()
    assert schema.read(utility_row(reports={"A": 0.5, "odd": "x"}))["reports"] == {"A": 0.5}
    column = schema.column("round", "reports")
    assert column.text({"reports": {"A": 0.5, "rate": 1, "odd": None}}) == "A 0.5, rate 1, odd –"
    (line,) = utility([utility_row(reports={"A": 0.5, "B": None}), utility_row(seed=1, reports={"A": 1.0, "B": None})])
    assert line["reports"] == {"A": 0.75, "B": None}


ODD = [None, 0, -1, 1e308, "x", [], ["x"], [["x"]], {}, {"a": 1}, True, "of n", "999999999", "x%"]


@pytest.mark.parametrize("field", [field.name for field in fields(Column)])
def test_a_damaged_column_of_a_metric_is_refused_or_can_be_shown(field):
    (plain,) = to_plain([schema_of().metrics[0]])
    for odd in ODD:
        try:
            (column,) = from_plain([plain | {field: odd}])
        except (TypeError, ValueError):
            continue
        assert column.text({column.key: 0.5}) in ("0.5", "0.50000")
        assert all(isinstance(text, str) for text in (column.key, column.head, column.help))


def test_a_list_of_metrics_has_a_largest_length():
    (plain,) = to_plain([schema_of().metrics[0]])
    with pytest.raises(ValueError, match="at most 100"):
        from_plain([plain] * 101)
    with pytest.raises(ValueError, match="a list"):
        from_plain({"a": plain})
