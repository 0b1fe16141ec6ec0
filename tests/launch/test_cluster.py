"""Which Ray a driver joins: no Ray needed."""

import socket

import pytest

from vit_ray.launch.cluster import check_reachable


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "localhost:{}"])
def test_an_address_at_which_nobody_listens_is_an_error_that_names_it(form: str) -> None:
    with socket.socket() as held:  # nobody will ever listen here
        held.bind(("127.0.0.1", 0))
        address = form.format(held.getsockname()[1])
        with pytest.raises(ValueError, match=f"RAY_ADDRESS={address}: no Ray answers there"):
            check_reachable(address, timeout_s=0.1)


def test_a_name_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="no Ray answers there"):
        check_reachable("no-such-host.invalid:6379", timeout_s=0.1)


def test_an_address_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reachable(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=0.1)


@pytest.mark.parametrize("address", ["auto", "local", "ray://head"])
def test_other_forms_are_left_to_ray(address: str) -> None:
    check_reachable(address, timeout_s=0.1)
