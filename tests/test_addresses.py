"""Secrets in addresses: what is taken out, and what must stay."""

import logging
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import make_url

from vit_ray.addresses import redact, redacted, userinfo
from vit_ray.commands.cli import RedactingFormatter
from vit_ray.config import load_recipe
from vit_ray.config.loading import write_yaml

SECRET = "hunter2"
SAFE = {
    "postgresql://user:hunter2@db:5432/mlflow": "postgresql://db:5432/mlflow",
    "http://hunter2@host/x": "http://host/x",
    "http://user:hun@ter2@mlflow:5000/a@b": "http://mlflow:5000/a@b",
    "http://tok@hunter2@host:5000/x@1": "http://host:5000/x@1",
    "s3://KEY:se/hunter2@bucket/folder": "s3://bucket/folder",
    "postgresql://db/m?sslmode=on&password=hunter2": "postgresql://db/m?sslmode=on&password=***",
    "x://h/?api_key=hunter2": "x://h/?api_key=***",
    "postgresql://u:2024/hunter2@db/m": "postgresql://db/m",
    "mysql://u:7 hunter2@db/m": "mysql://db/m",
    "https://h/a?X-Amz-Date=1&sig=hunter2": "https://h/a?X-Amz-Date=1&sig=***",
    "mysql://h/m?sslpass=hunter2&charset=utf8": "mysql://h/m?sslpass=***&charset=utf8",
    "two http://u:hunter2@a/b and http://u:hunter2@c/d": "two http://a/b and http://c/d",
    "('http://u:hunter2@a/b', 'http://c')": "('http://a/b', 'http://c')",
    "a\x1b[2Jb\rc\x9b31md\u202ee\x07\x7f": r"a\x1b[2Jb\rc\x9b31md\u202ee\x07\x7f",
}
PLAIN = [
    "s3://bucket/mail@host/x", "http://host:5000/runs@2", "sqlite:////a/b@c.db", "someone@host",
    "key=value", "/data/a?b=c", "see https://wiki.example.org/page?id=12&view=all#top",
    "tab\tline\nGr\u00fc\u00dfe \u65e5\u672c \U0001f600 C:\\x1b",
]  # fmt: skip


@pytest.mark.parametrize(("text", "safe"), [*SAFE.items(), *zip(PLAIN, PLAIN, strict=True)])
def test_secrets_are_taken_out_control_characters_spelt_out_and_the_rest_stays(text, safe):
    assert redact(text) == safe
    assert redacted({"a": [text], text: 1}) == {"a": [safe], safe: 1}


@example("", "://")
@given(
    user=st.text("ab:é%+", max_size=4).map(lambda text: text.replace(":", "")),
    password=st.text("ab:/?#%+ '\"<>;&=[]", min_size=1, max_size=8),
)
def test_no_password_that_sqlalchemy_takes_stays(user, password):
    address = f"postgresql://{user}:hunter2{password}@db:5432/mlflow"
    assert make_url(address).password == unquote(f"hunter2{password}")
    assert SECRET not in redact(address)
    assert make_url(redact(address)).host == "db"
    assert userinfo(address) == f"{user}:hunter2{password}"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("output=s3://KEY:se/hunter2@bucket/x", "output.* set AWS_ACCESS_KEY_ID"),
        ("data.train=s3://hunter2@bucket", "data.train.* set AWS_ACCESS_KEY_ID"),
        (
            "convert={source: 's3://KEY:hunter2@bucket', destination: x}",
            "convert.* set AWS_ACCESS_KEY_ID",
        ),
        ("tracking.uri=[http://u:hunter2@h]", "tracking.uri"),
        ("seed=http://u:hunter2@h", "seed"),
    ],
)
def test_an_error_of_the_recipe_does_not_repeat_a_secret(override, told):
    with pytest.raises(ValueError, match=told) as error:
        load_recipe("digits", [override])
    assert SECRET not in str(error.value)


def test_what_is_recorded_of_a_recipe_holds_no_secret_and_is_a_recipe_still(tmp_path):
    recipe = load_recipe("digits", ["tracking.uri=postgresql://u:hunter2@db/x"])
    recipe = recipe.with_absolute_paths()
    safe = recipe.with_changes(tracking={"uri": "postgresql://db/x"})
    assert recipe.flat()["tracking.uri"] == safe.tracking.uri
    path = tmp_path / "recipe.yaml"
    path.write_text(write_yaml(recipe.written("plan")))
    assert SECRET not in path.read_text()
    assert load_recipe(path) == safe


def test_log_lines_hold_no_secret():
    record = logging.LogRecord("x", 30, "f", 1, "lost %s", ("http://u:hunter2@h/p",), None)
    assert RedactingFormatter("%(message)s").format(record) == "lost http://h/p"
