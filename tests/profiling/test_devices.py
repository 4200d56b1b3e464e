"""GPUs known by name."""

from __future__ import annotations

import pytest

import fxmem
from fxmem.devices import DEVICES, device_named
from tests.cuda_stub.launch import environment


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_has_the_memory_that_its_name_says_but_for_what_the_driver_takes(name: str) -> None:
    device = device_named(name.upper())
    assert device.name == name
    said = name.rpartition("-")[2].removesuffix("gb")
    if said.isdigit():
        assert 0.9 * int(said) < device.memory_bytes / 2**30 <= int(said)
    assert device.threads_per_sm in (1024, 1536, 2048)
    assert device.half_flops_per_second > device.fp32_flops_per_second > device.bytes_per_second


def test_an_unknown_device_is_refused_with_those_known() -> None:
    with pytest.raises(fxmem.InputError, match="no GPU is known as 'h1000'; known are h100-80gb, "):
        device_named("h1000")


def test_the_emulated_device_is_told_what_the_table_says() -> None:
    told = environment(device_named("a100-80gb"))
    assert told["FXMEM_STUB_CAPABILITY"] == "80"
    assert told["FXMEM_STUB_SMS"] == "108"
    assert told["FXMEM_STUB_BYTES"] == str(device_named("a100-80gb").memory_bytes)
