"""GPUs known by name: what fxmem needs to know of a device that is not in this machine.

Sources: SMs, bandwidth and arithmetic from NVIDIA's data sheets and architecture white papers (dense figures, boost
clock); threads, shared memory and registers of an SM from the table of compute capabilities in the CUDA C++ programming
guide; ``memory_bytes`` as the runtime reports it (``total_memory``: device queries and "total capacity" in public
out-of-memory messages), which is less than the name says and differs by some 0.5 % between drivers and ECC settings.
None of it was read off a device by this project yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxmem.errors import InputError

GIB = 1 << 30
MIN_BLOCK_BYTES = 512
"""What CUDA's caching allocator rounds a request up to a multiple of."""


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One kind of GPU.

    ``capability``: compute capability, (9, 0) for sm_90. ``half_flops_per_second``: dense tensor-core rate in fp16 or
    bf16 with fp32 accumulation. ``fp32_flops_per_second``: without tensor cores.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    bytes_per_second: float
    fp32_flops_per_second: float
    half_flops_per_second: float
    resident_threads: int = 0
    """Most threads of one SM, as the runtime tells; 0: as the capability has it."""

    @property
    def threads_per_sm(self) -> int:
        """Most resident threads of one SM."""
        return self.resident_threads or _OF_CAPABILITY[self.capability][0]

    @property
    def shared_per_sm_bytes(self) -> int:
        """Shared memory of one SM."""
        return _OF_CAPABILITY[self.capability][1] << 10


_OF_CAPABILITY = {
    (7, 0): (2048, 96),
    (7, 5): (1024, 64),
    (8, 0): (2048, 164),
    (8, 6): (1536, 100),
    (8, 9): (1536, 100),
    (9, 0): (2048, 228),
    (10, 0): (2048, 228),
    (12, 0): (1536, 100),
}
"""Capability -> (threads, KiB of shared memory) of an SM."""

DEVICES = {
    device.name: device
    for device in (
        DeviceModel("h100-80gb", (9, 0), 132, 84929347584, 3.35e12, 66.9e12, 989e12),
        DeviceModel("h100-pcie", (9, 0), 114, 84929347584, 2.04e12, 51.2e12, 756e12),
        DeviceModel("h200", (9, 0), 132, int(139.8 * GIB), 4.8e12, 66.9e12, 989e12),
        DeviceModel("b200", (10, 0), 148, int(178.3 * GIB), 8.0e12, 80e12, 2250e12),
        DeviceModel("a100-80gb", (8, 0), 108, 81049 << 20, 2.039e12, 19.5e12, 312e12),
        DeviceModel("a100-40gb", (8, 0), 108, 42298834944, 1.555e12, 19.5e12, 312e12),
        DeviceModel("l4", (8, 9), 58, int(22.0 * GIB), 0.3e12, 30.3e12, 121e12),
        DeviceModel("l40s", (8, 9), 142, int(44.4 * GIB), 0.864e12, 91.6e12, 362e12),
        DeviceModel("a10g", (8, 6), 80, int(22.0 * GIB), 0.6e12, 31.5e12, 70e12),
        DeviceModel("v100-32gb", (7, 0), 80, int(31.7 * GIB), 0.9e12, 15.7e12, 125e12),
        DeviceModel("v100-16gb", (7, 0), 80, int(15.7 * GIB), 0.9e12, 15.7e12, 125e12),
        DeviceModel("t4", (7, 5), 40, int(14.6 * GIB), 0.32e12, 8.1e12, 65e12),
        DeviceModel("rtx3090", (8, 6), 82, int(23.6 * GIB), 0.936e12, 35.6e12, 71e12),
        DeviceModel("rtx4090", (8, 9), 128, int(23.5 * GIB), 1.008e12, 82.6e12, 165e12),
        DeviceModel("rtx5090", (12, 0), 170, int(31.3 * GIB), 1.792e12, 104.8e12, 209e12),
    )
}
"""Name -> device. "h100-80gb" and "h200" are the SXM modules."""


def rounded(nbytes: int) -> int:
    """Return what a request of ``nbytes`` counts as allocated: the next multiple of 512, at least 512."""
    return max(MIN_BLOCK_BYTES, -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def device_named(name: str) -> DeviceModel:
    """Return the GPU ``name``, or the first one that begins so: "h100" is "h100-80gb".

    Errors: ``InputError`` with the known names for one that is not known.
    """
    known = next((device for key, device in DEVICES.items() if name and key.startswith(name.lower())), None)
    if known is None:
        raise InputError(f"no GPU is known as {name!r}; known are {', '.join(DEVICES)}")
    return known


def device_like(
    name: str, capability: tuple[int, int], num_sms: int, memory_bytes: int, threads_per_sm: int
) -> DeviceModel:
    """Return the GPU that a runtime describes so, with the rates of the nearest known one of its capability."""
    peers = [d for d in DEVICES.values() if d.capability == capability] or list(DEVICES.values())
    nearest = min(peers, key=lambda d: abs(d.num_sms - num_sms))
    seen = replace(nearest, name=name, capability=capability, num_sms=num_sms, memory_bytes=memory_bytes)
    return replace(seen, resident_threads=threads_per_sm)
