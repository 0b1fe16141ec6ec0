import pytest

from vit_ray.data.prepare.run_tasks import run_tasks


def square(item: int) -> int:
    if item == 7:
        raise ValueError("seven is no good")
    if item == 8:
        error = OSError("the store is away")
        error.add_note("reading eight failed after 10 attempts.")
        raise error
    return item * item


def test_every_item_is_worked_on_once(ray_cluster: None) -> None:
    assert sorted(run_tasks(square, [1, 2, 3], 0.5)) == [1, 4, 9]
    assert run_tasks(square, [], 0.5) == []


def test_what_a_user_can_mend_comes_back_as_it_was_said(ray_cluster: None) -> None:
    with pytest.raises(ValueError, match=r"^seven is no good$"):
        run_tasks(square, [1, 7], 0.5)
    with pytest.raises(OSError, match=r"^the store is away; reading eight failed after 10 att"):
        run_tasks(square, [1, 8], 0.5)
