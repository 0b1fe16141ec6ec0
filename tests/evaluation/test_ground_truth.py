"""Right answers of published test sets, from files in the forms in which they are published."""

import json
from functools import partial
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
)

CLASSES = tuple(f"n{number:08d}" for number in range(6))
IMAGENET = tuple(f"n{number:08d}" for number in range(1000))
KEYS = [f"val/n0000/ILSVRC2012_val_{number:08d}.JPEG" for number in (3, 1, 4, 2)]
LABELS = np.array([2, 0, 5, 1], np.int32)
REAL = [[0, 4], [1], [2, 3], []]


def real(
    lists: Any = REAL, keys: list[str] = KEYS, labels: Any = LABELS, classes: Any = CLASSES
) -> Answers:
    return real_answers(lists, keys, labels, CLASSES, classes, "real.json")


def test_real_labels_go_to_the_images_by_the_number_in_their_keys():
    found = real().of_batch(np.zeros((4, 1), np.int32), np.array([0, 1, 2, 3]))
    assert found.tolist() == [[2, 3], [0, 4], [-1, -1], [1, -1]]
    padding = np.full((1, 1), -1, np.int32)  # which may have any answers
    assert real().of_batch(padding, np.array([-1])).shape == (1, 2)
    # A class may follow the number, and half of the images may have got another label.
    for name in ("ILSVRC2012_val_{:08d}_n01440764.JPEG", "ILSVRC2012_val_{:08d}"):
        assert real(keys=[name.format(number) for number in (3, 1, 4, 2)]).by_sample is not None
    real(lists=[[0], [1], [3], [4]])


def test_only_the_classes_of_real_compete_in_a_model_of_more():
    found = real(classes=("a", *CLASSES[::-1], "b"))
    assert found.num_outputs == 8
    assert found.competing.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.by_sample.tolist() == [[3, 2], [5, 1], [-1, -1], [4, -1]]


def test_folders_of_imagenet_v2_are_numbers_whatever_their_order():
    folders = sorted(str(number) for number in range(12))  # "0", "1", "10", "11", "2", ...
    answers = numbered_answers(folders, IMAGENET)
    found = answers.of_batch(np.array([[2], [4], [-1]], np.int32), np.arange(3))
    assert found.tolist() == [[10], [2], [-1]]


@pytest.mark.parametrize(
    ("set_classes", "competing", "named", "right"),
    [
        (["e", "b"], [1, 4], ("b", "e"), [[1], [0]]),  # the set has some of the model's classes
        (["f", "e", "d", "c", "b", "a"], None, tuple("abcdef"), [[5], [4]]),  # all, in its order
    ],
)
def test_the_classes_that_a_set_has_compete_in_the_models_order(
    set_classes, competing, named, right
):
    answers = named_answers(set_classes, tuple("abcdef"))
    assert (answers.classes, answers.num_outputs) == (named, 6)
    assert (None if answers.competing is None else answers.competing.tolist()) == competing
    assert answers.of_batch(np.array([[0], [1]], np.int32), np.arange(2)).tolist() == right


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


def test_class_lists_are_read_in_their_published_forms():
    synsets = "n01440764 tench, Tinca tinca\nn01443537 goldfish, Carassius auratus\n"
    assert parse_classes(synsets, ".txt", "x") == ("n01440764", "n01443537")
    assert parse_classes("kit fox\npark bench\n", ".txt", "x") == ("kit fox", "park bench")
    index = {"1": ["n01443537", "goldfish"], "0": ["n01440764", "tench"]}
    assert parse_classes(json.dumps(index), ".json", "x") == ("n01440764", "n01443537")
    assert parse_classes('["a", "b"]', ".json", "x") == ("a", "b")


def objectnet(file: str, content: str) -> Answers:
    return objectnet_answers({**MAPPINGS, file: content}, ["bench", "alarm_clock"], IMAGENET)


LABELS_FILE, CLASSES_FILE = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
ORDER_FILE = "pytorch_to_imagenet_2012_id.json"


@pytest.mark.parametrize(
    ("read", "word"),
    [
        (partial(real, REAL[:3]), "labels of 3 images"),
        # Each image gets the list of the one before it.
        (partial(real, REAL[-1:] + REAL[:-1]), "for 0.0% of the"),
        (partial(real, [[0], [2], [3], []]), r"33\.3% of the 3 images"),
        (partial(real, {"1": [0]}), "give real.json"),
        (partial(real, [[0], [1], [2], [6]]), "labels from 0 to 5"),
        (partial(real, [[0], [1], [2], [True]]), "not a list of lists"),
        (partial(real, [[], [], [], []]), "0.0% of the 0 images that both label"),
        (partial(real, keys=["a.jpg", *KEYS[1:]]), "'a.jpg'"),
        (partial(real, keys=["ILSVRC2012_val_000000030.JPEG", *KEYS[1:]]), "not identify one"),
        (partial(real, keys=[KEYS[0].replace("0003", "0009"), *KEYS[1:]]), "not identify one"),
        (partial(real, keys=[KEYS[1], *KEYS[1:]]), "another image has its number"),
        (partial(real, classes=CLASSES[1:]), "lacks 1 classes"),
        (partial(named_answers, ["a", "d"], ["c", "a", "b"]), "such as 'd'"),
        (partial(numbered_answers, ["0", "n02"], IMAGENET), "'n02'"),
        (partial(numbered_answers, ["0", "1000"], IMAGENET), "'1000'"),
        (partial(numbered_answers, ["0", "-5"], IMAGENET), "'-5'"),
        (partial(numbered_answers, ["\N{SUPERSCRIPT TWO}"], IMAGENET), "from 0 to 999"),
        (partial(numbered_answers, ["0", ""], IMAGENET), "from 0 to 999"),
        (partial(numbered_answers, ["0"], CLASSES), "imagenet_v2.* has 6"),
        (partial(objectnet_answers, MAPPINGS, ["bench"], CLASSES), "objectnet.* has 6"),
        (partial(objectnet, CLASSES_FILE, '{"Bench": "sofa"}'), "damaged.*sofa"),
        (partial(objectnet, CLASSES_FILE, '{"Bench": null}'), "damaged"),
        (partial(objectnet, CLASSES_FILE, "{}"), "no class of data.eval"),
        (partial(objectnet, LABELS_FILE, "["), "damaged.*objectnet.dev"),
        (partial(objectnet, LABELS_FILE, '{"bill": "Paper bill"}'), "'bench'"),
        (partial(objectnet, LABELS_FILE, '{"bench": ["Bench"]}'), "damaged"),
        (partial(objectnet, ORDER_FILE, "{}"), "damaged"),
        (partial(objectnet, ORDER_FILE, '{"1000": 2, "1": 0, "2": 3, "3": 1}'), "'1000'"),
        (partial(parse_classes, "a\na\n", ".txt", "x"), "x names 'a' twice"),
        (partial(parse_classes, '{"0": "a", "2": "b"}', ".json", "x"), "x is not a list"),
    ],
)
def test_what_is_not_as_published_or_not_of_this_set_is_refused(read, word):
    with pytest.raises(ValueError, match=word):
        read()
