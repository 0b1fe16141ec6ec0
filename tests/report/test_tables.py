"""Tables, read back by the csv module."""

import csv
import io

import pytest

from vit_ray.model_aliases import model_family
from vit_ray.models.catalog import model_names
from vit_ray.report.paper import TABLE_6
from vit_ray.report.tables import Column, Table, duration, first_of, number, percent


def test_the_csv_reads_back_and_unknown_stays_empty():
    table = Table("t", [Column("a"), Column("b", percent)], [['say "hi", you', 0.5], ["x", None]])
    assert list(csv.reader(io.StringIO(table.csv()))) == [
        ["a", "b"],
        ['say "hi", you', "50.0"],
        ["x", ""],
    ]


def test_a_share_is_in_percent_in_the_csv_as_on_the_page():
    heads = [Column("top-1 %", percent), Column("% of the time", number, is_bar=True)]
    heads += [Column("loss", number), Column("cell %")]
    table = Table("t", heads, [[0.29, 0.868, 0.29, "89.67"]])
    assert table.csv().splitlines()[1] == "29.0,86.8,0.29,89.67"
    assert Table("t", heads[:1], [[1], [0]]).csv().splitlines()[1:] == ["100.0", "0.0"]


def test_a_number_with_a_sign_is_no_formula_in_the_csv():
    values = ["-29.33", "+29.33", "-1e-06", "-1+1", "-A1", "+cmd|' /C calc'!A0", "=1", "@a", "-"]
    table = Table("t", [Column("=a")], [[value] for value in values])
    (head, *rows) = csv.reader(io.StringIO(table.csv()))
    assert head == ["'=a"]
    assert [row[0] for row in rows] == [*values[:3], *(f"'{value}" for value in values[3:])]


def test_unknown_is_a_dash_on_the_page_and_zero_is_zero():
    table = Table("t", [Column("a"), Column("b", percent)], [["x", None], ["y", 0.0]])
    assert [[cell.text for cell in row] for row in table.cells()] == [["x", "-"], ["y", "0.00"]]


def test_columns_that_nobody_filled_are_dropped():
    table = Table("t", [Column("a"), Column("b"), Column("c")], [["x", None, 0.0], ["y", "", None]])
    assert [column.title for column in table.used().columns] == ["a", "c"]


def test_of_many_names_the_first_are_listed_and_the_others_counted():
    assert first_of(["a", "b"], 2) == "a, b"
    assert first_of(["a", "b", "c", "d"], 2, "; ") == "a; b and 2 more"


def test_what_all_rows_share_is_said_once():
    heads = [Column("run"), Column("seed", number), Column("loss", number), Column("commit")]
    rows = [["a", 0.0, 1.0, None], ["b", 0.0, 1.0, "c0ffee"]]
    shown, shared = Table("t", heads, rows).without_shared(("seed", "commit"))
    assert shared == "seed 0"
    assert [column.title for column in shown.columns] == ["run", "loss", "commit"]
    assert shown.rows == [["a", 1.0, None], ["b", 1.0, "c0ffee"]]
    assert Table("t", heads, rows[:1]).without_shared(("seed",))[1] == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.4, "12 s"), (185, "3:05 min"), (7620, "2:07 h"), (59.6, "1:00 min")]
)
def test_durations_read_as_people_say_them(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ViT-H/14", "ViT"),
        ("ViT", "ViT"),
        ("R152x2", "ResNet"),
        ("ResNet", "ResNet"),
        ("R+ViT", "Hybrid"),
        ("R50x1+ViT-L/16", "Hybrid"),
        ("Axial-ViT-B/16", "Axial"),
        ("AxialResNet50", "Axial"),
        ("", "Other"),
    ],
)
def test_families_follow_the_catalog_names(name, family):
    assert model_family(name) == family


@pytest.mark.parametrize("name", model_names())
def test_every_model_of_the_catalog_has_a_family(name):
    assert model_family(name) != "Other"


def test_the_papers_table_holds_its_18_rows_in_three_families():
    assert len(TABLE_6) == 18
    assert {row.family for row in TABLE_6} == {"ViT", "ResNet", "Hybrid"}
    # Table 6 sums to 15,721 exaFLOPs, with the 859 that the paper prints for R50x1+ViT-L/16.
    assert sum(row.exaflops for row in TABLE_6) == 15_721


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00012, "1.2e-4"),
        (0.25, "0.25"),
        (1234.5, "1234"),
        (20000, "20k"),
        (1234567, "1.23M"),
        (3.03e8, "303M"),
        (4.2e9, "4.2G"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
