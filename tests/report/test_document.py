"""Pages as files: their rules, their figures' names, and two writers of one page."""

import os
import re

import pytest

from vit_ray.report.document import (
    Section,
    render,
    replace_file,
    with_content,
    write_files,
)
from vit_ray.report.figures import charts
from vit_ray.report.figures.charts import Axis, Chart, Point, Series
from vit_ray.report.tables import Column, Table, number


def chart(title):
    return Chart(title, Axis("x"), Axis("y"), [Series("one", [Point(1, 2)])])


def test_charts_whose_titles_differ_in_signs_alone_have_names_of_their_own():
    titles = ("cifar-10 top-1", "cifar.10 top-1", "cifar 10 top 1 2", "cifar 10 top 1")
    charts_of = [[chart(title) for title in some] for some in (titles[:2], titles[2:])]
    found = with_content(
        [Section(name, charts=one) for name, one in zip("ab", charts_of, strict=True)]
    )
    drawn = [one for section in found for one in section.charts]
    assert [one.title for one in drawn] == [*titles]
    assert [one.name for one in drawn] == [
        "cifar_10_top_1", "cifar_10_top_1_2", "cifar_10_top_1_2_2", "cifar_10_top_1_3",
    ]  # fmt: skip


def test_what_has_nothing_to_show_is_not_there():
    empty = Chart("Empty", Axis("x", is_log=True), Axis("y"), [Series("one", [Point(-1, 2)])])
    sections = [
        Section("One", charts=[empty], tables=[Table("t", [], [])]),
        Section("Two", charts=[empty, chart("A figure")]),
    ]
    assert [(one.title, len(one.charts)) for one in with_content(sections)] == [("Two", 1)]


def test_a_name_in_brackets_leads_to_its_row_if_only_one_row_has_it():
    rows = [["a", 1.0], ["b <i>", 2.0], ["twice", 3.0], ["twice", 4.0]]
    table = Table("Runs", [Column("run"), Column("loss", number)], rows, has_places=True)
    lead = ["a, not b, wins (a, b <i>, twice), not (90 %)."]
    text = render(
        "t", [Section("s", tables=[table, Table("Other", table.columns, rows)])], lead=lead
    )
    links = '<a href="#runs-1">a</a>, <a href="#runs-2">b &lt;i&gt;</a>'
    assert f"a, not b, wins ({links}, twice), not (90 %)." in text
    assert re.findall('<tr id="(.*?)">', text) == [f"runs-{number}" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("host", ["mlflow", "gpu01:5000", "mlflow-1", "127.0.0.1:5000", "[::1]"])
def test_the_address_at_the_end_of_a_page_is_a_link_whatever_its_host(host):
    text = render(
        "t", [], opening=f"mlflow ui --uri sqlite:////a<b@c.org.db then http://{host}/#/a&b"
    )
    link = f'<a href="http://{host}/#/a&amp;b" rel="noopener">http://{host}/#/a&amp;b</a>'
    assert f"<footer><p>mlflow ui --uri sqlite:////a&lt;b@c.org.db then {link}</p>" in text
    assert "<p>nothing &lt;here&gt;</p>" in render("t", [], opening="nothing <here>")


def test_files_that_a_page_did_not_write_stay_beside_its_figures(tmp_path):
    folder = tmp_path / "figures"
    write_files(folder, [])
    assert not folder.exists()
    write_files(folder, [Section("s", charts=[chart("First"), chart("Second")])])
    assert {path.name for path in folder.iterdir()} == {"first.svg", "second.svg"}
    (folder / "mine.svg").write_bytes(b"x")
    write_files(folder, [Section("s", charts=[chart("Second")])])
    assert (folder / "mine.svg").read_bytes() == b"x"


def test_two_that_write_one_page_at_a_time_both_can(tmp_path, monkeypatch):
    page, replace, others = tmp_path / "report.html", os.replace, [b"theirs"]

    def between(source, target):
        if others:
            replace_file(page, others.pop())
        replace(source, target)

    monkeypatch.setattr(os, "replace", between)
    replace_file(page, b"ours")
    assert page.read_bytes() == b"ours"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_counts_are_drawn_exactly_and_fractions_to_seven_digits():
    exact = Chart("t", Axis("x"), Axis("y"), [Series("s", [Point(14_197_122, 0.123456789)])])
    assert exact.rows == [{"x": 14_197_122.0, "y": 0.1234568, "line": 0}]
    assert "14197122" in charts.svg(exact)
