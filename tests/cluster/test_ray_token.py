"""Ray's own answer to those who do not have the token."""

import os
import urllib.error
import urllib.request

from tests.conftest import Head


def _get(head: Head, path: str, token: str | None) -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{head.dashboard}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_ray_answers_nobody_without_the_token(ray_head):
    path = "/api/jobs/"
    assert _get(ray_head, path, os.environ["RAY_AUTH_TOKEN"]) == 200
    assert _get(ray_head, path, None) == 401
    assert _get(ray_head, path, "0" * 64) == 403
