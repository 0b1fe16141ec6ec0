"""An S3 (moto) that gives its user the rights of a policy and no others, as AWS does."""

import contextlib
import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import botocore.session
import pytest

from tests.data import s3_server

ACTIONS = {
    "list": "s3:ListBucket",
    "read": "s3:GetObject",
    "write": "s3:PutObject",
    "delete": "s3:DeleteObject",
}
Policy = Mapping[str, Any]
Rights = Mapping[str, Sequence[str]]
"""Of the user, by bucket."""


def policy_of(rights: Rights) -> Policy:
    statements = [
        {
            "Effect": "Allow",
            "Action": [ACTIONS[right] for right in held],
            "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
        }
        for bucket, held in rights.items()
        if held
    ]
    return {"Version": "2012-10-17", "Statement": statements}


@contextlib.contextmanager
def serve_s3_with_policy(
    contents: Mapping[str, Mapping[str, bytes]],
) -> Iterator[Callable[[Policy], None]]:
    """Inside the block `s3://` is a store of these buckets; yields what sets the user's policy."""
    with s3_server.serve_conditional_s3() as port, pytest.MonkeyPatch.context() as patch:
        address = f"http://127.0.0.1:{port}"

        def check_rights(is_on: bool) -> None:
            # So many requests pass unchecked.
            count = b"0" if is_on else b"inf"
            request = urllib.request.Request(f"{address}/moto-api/reset-auth", data=count)
            request.add_header("Content-Type", "text/plain")
            urllib.request.urlopen(request, timeout=60).close()

        def owner(service: str) -> Any:
            return botocore.session.get_session().create_client(
                service, region_name="us-east-1", endpoint_url=address,
                aws_access_key_id="owner", aws_secret_access_key="owner",  # noqa: S106
            )  # fmt: skip

        check_rights(False)
        iam, s3 = owner("iam"), owner("s3")
        for bucket, files in contents.items():
            s3.create_bucket(Bucket=bucket)
            for key, content in files.items():
                s3.put_object(Bucket=bucket, Key=key, Body=content)
        iam.create_user(UserName="user")
        key = iam.create_access_key(UserName="user")["AccessKey"]

        def allow(policy: Policy) -> None:
            check_rights(False)
            iam.put_user_policy(
                UserName="user", PolicyName="rights", PolicyDocument=json.dumps(policy)
            )
            check_rights(True)

        patch.setattr(s3_server, "ACCESS_KEY", key["AccessKeyId"])
        patch.setattr(s3_server, "SECRET_KEY", key["SecretAccessKey"])
        with s3_server.this_process_uses(port, timeout_s=60):
            yield allow
