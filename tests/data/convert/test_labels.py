"""The classes of a source, from its labels and what it says of them."""

import pytest

from tests.data.converting import config_of
from vit_ray.data.convert import labels as labels_module
from vit_ray.data.convert.rows import Row, row_table


def test_a_column_that_is_no_label_is_refused():
    facts = labels_module.SourceFacts({})
    facts.add(row_table([Row(str(i), (f"caption {i}",)) for i in range(1000)]))
    config = config_of("source", "set")
    with pytest.raises(ValueError, match=r"1,000 different labels, .*check convert\.label_field"):
        labels_module.classes_of(facts, config, of_folders=False)


def test_more_labels_than_a_set_has_classes_are_refused_while_rows_are_counted(monkeypatch):
    monkeypatch.setattr(labels_module, "MOST_CLASSES", 3)
    facts = labels_module.SourceFacts({})
    facts.add(row_table([Row(str(i), (f"{i % 3}",)) for i in range(6)]))
    with pytest.raises(
        ValueError, match=r"more than 3 different labels; check convert\.label_field"
    ):
        facts.add(row_table([Row("6", ("other",))]))


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"0", "-1", "1"}, r"from -1 to 1 \(-1 by convention means that an image is not labelled"),
        ({"0", "1", "3"}, "from 0 to 3, and not 0 to 2, .*labels_are=indices .*labels_are=names"),
        ({"1", "2", "3"}, "from 1 to 3, and not 0 to 2"),
        ({"0", "1", "01"}, "3 integers from 0 to 1, and not 0 to 2"),
    ],
)
def test_integers_that_are_not_all_from_0_on_are_not_closed_up_without_a_word(labels, told):
    for kinds in ({"index"}, {"text"}):
        with pytest.raises(ValueError, match=told):
            labels_module.class_names(labels, kinds, None, "auto")
    # What a folder is called is a name; and names may be what they like.
    numbered = sorted(labels, key=lambda label: (int(label), label))
    assert labels_module.class_names(labels, {"text"}, None, "auto", of_folders=True) == (
        numbered,
        False,
    )
    assert labels_module.class_names(labels, {"text"}, None, "names") == (numbered, False)


def test_indices_without_names_keep_their_places():
    found = labels_module.class_names({"0", "3"}, {"index"}, None, "indices")
    assert found == (["0", "1", "2", "3"], True)
    assert labels_module.class_names({"0", "1"}, {"index"}, None, "auto") == (["0", "1"], False)
    for wrong in ({"0", "-1"}, {"0", "cat"}, {"0", "01"}):
        with pytest.raises(ValueError, match=r"are not integers from 0 on; correct them"):
            labels_module.class_names(wrong, {"text"}, None, "indices")
    with pytest.raises(ValueError, match=r"check convert\.label_field"):
        labels_module.class_names({"0", "999999999999"}, {"index"}, None, "indices")


def test_a_source_without_any_label_has_no_classes():
    for labels_are in ("auto", "names", "indices"):
        assert labels_module.class_names(set(), set(), None, labels_are)[0] == []
