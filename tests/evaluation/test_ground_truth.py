"""Right answers of published test sets, from files in the forms in which they are published."""

import json
from typing import Any

import numpy as np
import pytest

from vit_ray.evaluation.ground_truth import (
    Answers,
    named_answers,
    numbered_answers,
    objectnet_answers,
    parse_classes,
    real_answers,
    real_lists,
)

CLASSES = tuple(f"n{number:08d}" for number in range(6))
IMAGENET = tuple(f"n{number:08d}" for number in range(1000))
KEYS = [f"val/n0000/ILSVRC2012_val_{number:08d}.JPEG" for number in (3, 1, 4, 2)]
LABELS = np.array([2, 0, 5, 1], np.int32)
REAL = [[0, 4], [1], [2, 3], []]


def real(
    lists: Any = REAL, keys: list[str] = KEYS, labels: Any = LABELS, classes: Any = CLASSES
) -> Answers:
    told = real_lists(lists, len(keys), len(CLASSES), "real.json")
    return real_answers(told, keys, labels, CLASSES, classes, "real.json")


def test_real_labels_go_to_the_images_by_the_number_in_their_keys():
    found = real().of_batch(np.zeros((4, 1), np.int32), np.array([0, 1, 2, 3]))
    assert found.tolist() == [[2, 3], [0, 4], [-1, -1], [1, -1]]
    padding = np.full((1, 1), -1, np.int32)  # which may have any answers
    assert real().of_batch(padding, np.array([-1])).shape == (1, 2)


@pytest.mark.parametrize("name", ["ILSVRC2012_val_{:08d}_n01440764.JPEG", "ILSVRC2012_val_{:08d}"])
def test_a_class_may_follow_the_number_in_a_key(name):
    keys = [name.format(number) for number in (3, 1, 4, 2)]
    assert real(keys=keys).by_sample is not None
    with pytest.raises(ValueError, match="does not identify one"):
        real(keys=["ILSVRC2012_val_000000030.JPEG", *keys[1:]])


def test_real_labels_are_those_of_the_models_outputs():
    found = real(classes=CLASSES[::-1])
    right = found.of_batch(np.zeros((4, 1), np.int32), np.array([0, 1, 2, 3]))
    assert right.tolist() == [[3, 2], [5, 1], [-1, -1], [4, -1]]
    assert (found.classes, found.competing, found.num_outputs) == (CLASSES[::-1], None, 6)


def test_only_the_classes_of_real_compete_in_a_model_of_more():
    found = real(classes=("a", *CLASSES[::-1], "b"))
    assert found.num_outputs == 8
    assert found.competing.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.by_sample.tolist() == [[3, 2], [5, 1], [-1, -1], [4, -1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lists": REAL[:3]}, "has labels of 3 images and data.eval has 4 images"),
        # Each image gets the list of the one before it.
        ({"lists": REAL[-1:] + REAL[:-1]}, "agrees with data.eval for 0.0% of the images"),
        ({"lists": {"1": [0]}}, "is not a list of lists of labels from 0 to 5; give real.json"),
        ({"lists": [[0], [1], [2], [6]]}, "is not a list of lists of labels from 0 to 5"),
        ({"lists": [[0], [1], [2], [True]]}, "is not a list of lists"),
        ({"keys": ["a.jpg", *KEYS[1:]]}, "the key 'a.jpg' does not identify one"),
        ({"keys": [KEYS[0].replace("0003", "0009"), *KEYS[1:]]}, "does not identify one"),
        ({"keys": [KEYS[1], *KEYS[1:]]}, "1 images have the name of another one"),
        ({"lists": [[], [], [], []]}, "labels none of the images"),
        ({"classes": CLASSES[1:]}, "lacks 1 classes of data.eval, .*it has 5,"),
    ],
)
def test_a_file_that_is_not_of_this_set_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        real(**changes)


def test_half_of_the_images_may_have_got_another_label_than_imagenets():
    real(lists=[[0], [1], [3], [4]])
    with pytest.raises(ValueError, match=r"33\.3% of the images"):
        real(lists=[[0], [2], [3], []])


def test_folders_of_imagenet_v2_are_numbers_whatever_their_order():
    folders = sorted(str(number) for number in range(12))  # "0", "1", "10", "11", "2", ...
    answers = numbered_answers(folders, IMAGENET)
    found = answers.of_batch(np.array([[2], [4], [-1]], np.int32), np.arange(3))
    assert found.tolist() == [[10], [2], [-1]]


@pytest.mark.parametrize("folder", ["n02", "1000", "-5", "\N{SUPERSCRIPT TWO}", ""])
def test_a_folder_that_is_no_number_of_an_imagenet_class_is_refused(folder):
    with pytest.raises(ValueError, match=f"data.eval, '{folder}', is not a number from 0 to 999"):
        numbered_answers(["0", folder], IMAGENET)


def test_a_model_of_other_classes_than_imagenets_is_refused():
    more = tuple(map(str, range(21_843)))
    with pytest.raises(ValueError, match=r"imagenet_v2 needs a model of .*1,000.* has 21843"):
        numbered_answers(["0"], more)
    with pytest.raises(ValueError, match=r"objectnet needs a model of .*1,000.* has 6"):
        objectnet_answers(MAPPINGS, ["bench"], CLASSES)


def test_only_the_classes_that_a_set_has_compete():
    answers = named_answers([CLASSES[4], CLASSES[1]], CLASSES)
    assert answers.competing.tolist() == [1, 4]
    assert answers.classes == (CLASSES[1], CLASSES[4])
    assert answers.num_outputs == 6
    found = answers.of_batch(np.array([[0], [1]], np.int32), np.arange(2))
    assert found.tolist() == [[1], [0]]


def test_the_models_classes_may_stand_in_another_order_than_the_sets():
    answers = named_answers(["a", "b", "c"], ["c", "a", "b"])
    assert answers.competing is None
    found = answers.of_batch(np.array([[0], [1], [2]], np.int32), np.arange(3))
    assert found.tolist() == [[1], [2], [0]]
    with pytest.raises(ValueError, match=r"lacks 1 classes of data.eval, such as 'd' \(it has 3,"):
        named_answers(["a", "d"], ["c", "a", "b"])


# The names of ImageNet's classes are lists of synonyms, and stand in the challenge's order.
MAPPINGS = {
    "folder_to_objectnet_label.json": json.dumps(
        {"alarm_clock": "Alarm clock", "bench": "Bench", "bill": "Paper bill"}
    ),
    "objectnet_to_imagenet_1k.json": json.dumps(
        {"Alarm clock": "analog clock; digital clock", "Bench": "park bench"}
    ),
    "pytorch_to_imagenet_2012_id.json": json.dumps({"0": 2, "1": 0, "2": 3, "3": 1}),
    "imagenet_to_label_2012_v2": "digital clock\nkit fox\nanalog clock\npark bench\n",
}


def test_a_class_of_objectnet_is_one_or_several_of_imagenets_or_none():
    answers = objectnet_answers(MAPPINGS, ["bill", "alarm_clock", "bench"], IMAGENET)
    labels = np.array([[0], [1], [2]], np.int32)
    assert answers.of_batch(labels, np.arange(3)).tolist() == [[-1, -1], [0, 1], [2, -1]]
    assert answers.competing is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("objectnet_to_imagenet_1k.json", '{"Bench": "sofa"}', "are damaged.*sofa"),
        ("folder_to_objectnet_label.json", "[", "are damaged.*objectnet.dev"),
        ("pytorch_to_imagenet_2012_id.json", "{}", "are damaged"),
        ("folder_to_objectnet_label.json", '{"bill": "Paper bill"}', "'bench'.*is not a folder"),
        (
            "pytorch_to_imagenet_2012_id.json",
            '{"1000": 2, "1": 0, "2": 3, "3": 1}',
            "are damaged.*'1000', is not a number from 0 to 999",
        ),
        ("folder_to_objectnet_label.json", '{"bench": ["Bench"]}', "are damaged.*not a text"),
        ("objectnet_to_imagenet_1k.json", '{"Bench": null}', "are damaged"),
        ("objectnet_to_imagenet_1k.json", "{}", "no class of data.eval is one of ImageNet's"),
    ],
)
def test_mappings_that_are_not_as_published_are_refused(file, content, message):
    with pytest.raises(ValueError, match=message):
        objectnet_answers({**MAPPINGS, file: content}, ["bench", "alarm_clock"], IMAGENET)


def test_class_lists_are_read_in_their_published_forms():
    synsets = "n01440764 tench, Tinca tinca\nn01443537 goldfish, Carassius auratus\n"
    assert parse_classes(synsets, ".txt", "x") == ("n01440764", "n01443537")
    assert parse_classes("kit fox\npark bench\n", ".txt", "x") == ("kit fox", "park bench")
    index = {"1": ["n01443537", "goldfish"], "0": ["n01440764", "tench"]}
    assert parse_classes(json.dumps(index), ".json", "x") == ("n01440764", "n01443537")
    assert parse_classes('["a", "b"]', ".json", "x") == ("a", "b")
    with pytest.raises(ValueError, match="x names 'a' twice"):
        parse_classes("a\na\n", ".txt", "x")
    with pytest.raises(ValueError, match="x is not a list of classes"):
        parse_classes('{"0": "a", "2": "b"}', ".json", "x")
    with pytest.raises(ValueError, match=r"give a converted set, a \.txt or a \.json"):
        parse_classes("a", ".csv", "x")
