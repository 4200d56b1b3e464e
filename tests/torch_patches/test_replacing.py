"""Functions of torch that are replaced for a while, for one thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fxmem.torch_patches.replacing import replaced_here


class Owner:
    @staticmethod
    def one(x: int) -> int:
        return x

    def other(self, x: int) -> int:
        return x


def test_another_thread_calls_the_original() -> None:
    owner = Owner()
    before = dict(vars(Owner))
    with (
        replaced_here(Owner, "one", lambda x: -x),
        replaced_here(Owner, "other", lambda self, x: -x),
        ThreadPoolExecutor(1) as pool,
    ):
        assert (owner.one(1), Owner.one(1), owner.other(1)) == (-1, -1, -1)
        assert [pool.submit(call, 1).result() for call in (owner.one, Owner.one, owner.other)] == [1, 1, 1]
    assert dict(vars(Owner)) == before
