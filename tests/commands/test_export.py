"""A model to give away: class names, image processor, card, and the hub that it is pushed to."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTForImageClassification
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from tests.commands.command_line import run_cli
from tests.data.small_sets import write_set
from tests.models.small import TINY_VIT, small_model, some_images
from tests.trained_runs import tiny_recipe, write_run
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.checkpoints.init_weights import published_classes
from vit_ray.commands.trained_model import export
from vit_ray.config import load_recipe
from vit_ray.data import open_dataset
from vit_ray.data.boxes import Augmentation
from vit_ray.data.crops import crop_of
from vit_ray.launch.model_card import image_processor
from vit_ray.launch.resolved_run import check_weights, resolve_run
from vit_ray.models.weights import load_weights, save_weights

CLASSES = ("ant", "bee", "cat", "dog", "elk")
PROCESSORS = {
    "BitImageProcessor": BitImageProcessorPil,
    "ViTImageProcessor": ViTImageProcessorPil,
}


def photographs(count: int) -> Iterator[Image.Image]:
    random, whole = np.random.default_rng(0), load_sample_images().images
    for index in range(count):
        picture = whole[index % 2]
        height, width = random.integers(90, 427), random.integers(90, 640)
        top = random.integers(0, picture.shape[0] - height + 1)
        left = random.integers(0, picture.shape[1] - width + 1)
        yield Image.fromarray(picture[top : top + height, left : left + width])


@pytest.mark.parametrize(
    "crop",
    [
        Augmentation("center_crop", 224, flip=False, resize=256, interpolation="bicubic"),
        Augmentation("center_crop", (96, 160), flip=False, resize=183),
        Augmentation("resize", (48, 64), flip=False),
    ],
)
def test_the_image_processor_gives_the_pixels_of_our_evaluation(crop):
    settings = json.loads(json.dumps(image_processor(crop)))
    processor = PROCESSORS[settings.pop("image_processor_type")](**settings)

    decibels = []
    for photograph in photographs(20):
        file = io.BytesIO()
        photograph.save(file, "PNG", compress_level=1)
        pixels = processor(images=photograph, return_tensors="np")["pixel_values"][0]
        ours = crop_of(file.getvalue(), crop, (0, 0, 0)).astype(np.float64)
        theirs = (pixels.transpose(1, 2, 0) + 1) * 127.5
        assert theirs.shape == (crop.height, crop.width, 3)
        decibels.append(10 * np.log10(255**2 / np.mean((ours - theirs) ** 2)))
    assert np.mean(decibels) > 29  # sharp photographs half a pixel beside themselves have 21 to 26
    assert min(decibels) > 20


def trained_run(folder: Path) -> tuple[Any, Path]:
    """A model and the run that trained it, on sets of five classes that are still there."""
    train = write_set(folder / "data/train", [("a", [0]), ("b", [4])], CLASSES)
    rows = [(f"t{index}", [index % 5]) for index in range(40)]
    test = write_set(folder / "data/test", rows, CLASSES)
    model = small_model("ViT").eval()
    recipe = tiny_recipe(
        folder,
        data={"train": train.path, "eval": test.path},
        tracking={"uri": "postgresql://me:secret@host/mlflow"},
    )
    facts = {
        "progress": Progress(7, worker_seconds=7200.0, metrics={"eval/top1": 0.85}),
        "recipe": recipe.recorded(), "data_fingerprint": train.fingerprint,
        "data_terms": {"license": "CC0", "source_url": "https://me:pw@x.org/a"},
        "samples_seen": 1000, "tracking_run_id": "0123abc",
    }  # fmt: skip
    return model, Path(write_run(folder / "run", model, facts=facts))


def export_to(folder: Path, run: Path, layout: str, **settings: Any) -> Path:
    exports = {"path": str(folder / "given" / layout), "layout": layout, **settings}
    export(tiny_recipe(folder, init_from=str(run), export=exports))
    return Path(exports["path"])


@pytest.mark.parametrize("layout", ["jax", "timm", "huggingface", "vit_ray"])
def test_a_folder_has_weights_class_names_processor_and_card(layout, tmp_path):
    model, run = trained_run(tmp_path)
    path = export_to(tmp_path, run, layout)
    weights = path / ("model.npz" if layout == "jax" else "model.safetensors")
    names = {weights.name, "config.json", "preprocessor_config.json", "README.md"}
    assert {file.name for file in path.iterdir()} == names
    assert published_classes(str(weights)) == CLASSES
    assert all(file.stat().st_mode & 0o044 for file in path.iterdir())
    again = small_model("ViT")
    torch.nn.init.normal_(again.norm.weight)
    report = load_weights(again, weights)
    assert len(report.loaded) == len(model.state_dict())
    assert torch.equal(again(some_images()), model(some_images()))


def test_transformers_reads_class_names_and_logits_of_a_folder_by_the_command_line(tmp_path):
    model, run = trained_run(tmp_path)
    (tmp_path / "recipe.yaml").write_text(tiny_recipe(tmp_path).model_dump_json())
    exports = f"export={{path: {tmp_path}/hub, layout: huggingface}}"
    done = run_cli("export", str(tmp_path / "recipe.yaml"), f"init_from={run}", exports)
    assert done.exit_code == 0, done.stderr
    assert f"loaded   {len(model.state_dict())} tensors" in done.stdout
    peer = ViTForImageClassification.from_pretrained(tmp_path / "hub").eval()
    assert peer.config.id2label == dict(enumerate(CLASSES))
    assert peer.config.label2id == {name: index for index, name in enumerate(CLASSES)}
    with torch.no_grad():
        ours, theirs = model(some_images()), peer(some_images()).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_timms_configuration_says_all_that_differs_from_its_defaults(tmp_path):
    _, run = trained_run(tmp_path)
    config = json.loads((export_to(tmp_path, run, "timm") / "config.json").read_text())
    arguments, use = config["model_args"], config["pretrained_cfg"]
    assert (config["architecture"], config["num_classes"]) == ("vit_base_patch16_224", 5)
    assert config["label_names"] == list(CLASSES)
    assert int(arguments["embed_dim"] * arguments["mlp_ratio"]) == TINY_VIT["mlp_dim"]
    expected = {"act_layer": "gelu_tanh", "fc_norm": False, "global_pool": "token"}
    expected |= {"depth": 2, "num_heads": 4, "patch_size": 8}
    assert expected.items() <= arguments.items()
    assert (use["input_size"], use["interpolation"]) == ([3, 32, 32], "bilinear")
    assert use["crop_pct"] == pytest.approx(32 / 37)
    # No architecture for what it would compute otherwise.
    save_weights(small_model("R+ViT"), tmp_path / "hybrid", "timm", CLASSES)
    config = json.loads((tmp_path / "hybrid" / "config.json").read_text())
    assert config == {"num_classes": 5, "label_names": list(CLASSES)}


def test_the_card_says_what_was_trained_on_what_and_how_good_it_is(tmp_path):
    _, run = trained_run(tmp_path)
    path = export_to(tmp_path, run, "huggingface", license="apache-2.0")
    card = ModelCard.load(path / "README.md")
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "transformers")
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_value) == ("data/test", 0.85)
    assert "A proxy, not a result in the paper's setting: paper.task is not set" in card.text
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        small_model("ViT", pool="gap")(some_images(1))  # which computes all of its last block
    # Without the class token, which is one of 17 tokens.
    exaflops = 3 * counter.get_total_flops() * 1000 / 1e18
    (compute,) = re.findall(r"\| compute \| (\S+) exaFLOPs \|", card.text)
    assert float(compute) == pytest.approx(exaflops, rel=0.1)
    print_of_data = open_dataset(str(tmp_path / "data/train")).fingerprint
    assert f"| fingerprint of the data | {print_of_data} |" in card.text
    facts = ("train: data/train\n", "2 worker-hours", "0123abc", "name: ViT")
    for fact in (*facts, "| licence of the data | CC0 |", "x.org/a |"):
        assert fact in card.text
    assert not [one for one in ("secret", "pw", str(tmp_path)) if one in card.content]


def test_weights_and_card_are_pushed_and_other_files_and_a_card_that_is_there_stay(
    tmp_path, monkeypatch, capsys
):
    pushed: dict[str, bytes] = {}

    def upload(folder_path: Path, allow_patterns: list[str], **_: object) -> str:
        pushed.update({name: (folder_path / name).read_bytes() for name in allow_patterns})
        return "https://hub/someone/vit/commit/1"

    hub = create_autospec(HfApi, instance=True)
    hub.upload_folder.side_effect = upload
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    _, run = trained_run(tmp_path)
    (tmp_path / "given" / "huggingface").mkdir(parents=True)
    (tmp_path / "given" / "huggingface" / "private.txt").write_text("not of the model")
    path = export_to(tmp_path, run, "huggingface", push="hf://someone/vit")
    hub.create_repo.assert_called_once_with("someone/vit", exist_ok=True)
    names = {"model.safetensors", "config.json", "preprocessor_config.json", "README.md"}
    assert {name: (path / name).read_bytes() for name in names} == pushed
    assert "/someone/vit/commit/1" in capsys.readouterr().out
    assert 'from_pretrained("someone/vit")' in pushed["README.md"].decode()
    (path / "README.md").write_text("mine")
    hub.create_repo.side_effect = OSError("401: Invalid username or password.")
    with pytest.raises(ValueError, match=r"(?s)did not accept the files .*set HF_TOKEN to a"):
        export_to(tmp_path, run, "huggingface", push="hf://someone/vit")
    assert (path / "README.md").read_text() == "mine"


def test_code_that_only_a_checkpoint_names_is_not_run_by_export_and_evaluation(
    tmp_path, monkeypatch
):
    """A checkpoint of our ViT says that it is of a model in a module, whose import would show."""
    (tmp_path / "mischief.py").write_text("raise SystemExit('its code was run')\n")
    monkeypatch.chdir(tmp_path)
    model = small_model("ViT").eval()
    recorded = tiny_recipe(
        tmp_path,
        model={"name": "mischief.Model", "image_size": 32},
        train={"loss": "mischief.loss", "callbacks": ["mischief.callback"]},
        optim={"name": "mischief.optimizer"},
        data={"augment": {"own": "mischief.augment"}},
        evaluate={"metrics": ["mischief.metric"]},
    ).recorded()
    run = Path(write_run(tmp_path / "run", model, facts={"recipe": recorded}))
    path = export_to(tmp_path, run, "vit_ray")
    test = write_set(tmp_path / "test", [(f"t{index}", [index]) for index in range(5)], CLASSES)
    evaluated = tiny_recipe(tmp_path, init_from=str(run), data={"eval": test.path})
    check_weights(resolve_run(evaluated, needs_train=False), "evaluate")
    again = small_model("ViT")
    load_weights(again, path)
    assert torch.equal(again(some_images()), model(some_images()))
    assert "| compute | unknown |" in (path / "README.md").read_text()
    named = {"name": "mischief.Model", "image_size": 32}
    exports = {"path": str(tmp_path / "x")}
    with pytest.raises(ValueError, match=r"add --module mischief to the command"):
        export(tiny_recipe(tmp_path, model=named, init_from=str(run), export=exports))
    words = ["model.name=mischief.Model", f"init_from={run}", "export.path=x", "output=runs"]
    with pytest.raises(SystemExit, match="its code was run"):
        export(load_recipe("digits", words))
