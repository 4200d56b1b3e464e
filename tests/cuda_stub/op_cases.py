"""What the probe measures: op calls with their backward, by family; shapes chosen so that every branch of a rule is met.

Each case is (name, make, call): ``make()`` gives the inputs on the device, ``call(*inputs)`` one output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Case = tuple[str, Callable[[], list[Tensor]], Callable[..., Tensor]]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROWS = [
    (512, 4096), (1024, 768), (2048, 512), (2048, 513), (4096, 64), (4096, 1024), (8192, 10), (8192, 1000), (16384, 512),
    (16384, 2048), (65536, 256), (3000, 1000), (4096, 4096), (32768, 768), (512, 50257), (1 << 20, 64), (300, 130),
]  # fmt: skip


def new(*shape: int, dtype: torch.dtype = F32, grad: bool = True, nhwc: bool = False) -> Tensor:
    x = torch.zeros(*shape, device="cuda", dtype=dtype)
    return (x.to(memory_format=torch.channels_last) if nhwc else x).requires_grad_(grad)


def ids(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda", dtype=torch.long)


def case(name: str, call: Callable[..., Tensor], *shapes: Any, **options: Any) -> Case:
    """A case whose inputs are given by shapes; a shape in a list is one of indices."""
    return name, lambda: [ids(*s) if isinstance(s, list) else new(*s, **options) for s in shapes], call


def cases() -> Iterator[Case]:
    for dtype, tag in ((F32, "fp32"), (BF16, "bf16")):
        for make in (_reductions, _losses, _elementwise, _norms, _attention, _convolutions, _indexing, _rest):
            for name, inputs, call in make(dtype):
                yield f"{tag} {name}", inputs, call
    yield from _autocast()


def _reductions(dtype: torch.dtype) -> Iterator[Case]:
    for rows, cols in ROWS:
        yield case(f"sum0 {rows}x{cols}", lambda x: x.sum(0), (rows, cols), dtype=dtype)
    for rows, cols in ROWS[3:16:3]:
        yield case(f"linear bias {rows}x{cols}", F.linear, (rows, 64), (cols, 64), (cols,), dtype=dtype)
        yield case(f"add bias {rows}x{cols}", torch.add, (rows, cols), (cols,), dtype=dtype)
        yield case(f"var0 {rows}x{cols}", lambda x: x.var(0), (rows, cols), dtype=dtype)
        yield case(f"std0 {rows}x{cols}", lambda x: x.std(0), (rows, cols), dtype=dtype)
        yield case(f"amax0 {rows}x{cols}", lambda x: x.amax(0), (rows, cols), dtype=dtype)
        yield case(f"sum1 {rows}x{cols}", lambda x: x.sum(1), (rows, cols), dtype=dtype)
        yield case(f"sum all {rows}x{cols}", torch.sum, (rows, cols), dtype=dtype)
        yield case(f"mean all {rows}x{cols}", torch.mean, (rows, cols), dtype=dtype)
        yield case(f"norm {rows}x{cols}", torch.norm, (rows, cols), dtype=dtype)
        yield case(f"prod {rows}x{cols}", torch.prod, (rows, cols), dtype=dtype)
        yield case(f"max0 {rows}x{cols}", lambda x: x.max(0)[0], (rows, cols), dtype=dtype)
    for shape in ((4, 8, 32, 32), (32, 64, 112, 112), (8, 64, 56, 56)):
        for nhwc in (False, True):
            yield case(f"sum023 {shape} nhwc={nhwc}", lambda x: x.sum((0, 2, 3)), shape, dtype=dtype, nhwc=nhwc)
    yield case("sum01 16x1024x768", lambda x: x.sum((0, 1)), (16, 1024, 768), dtype=dtype)
    yield case("sum1 of 3 16x4096x96", lambda x: x.sum(1), (16, 4096, 96), dtype=dtype)
    yield case("mean(2,3)", lambda x: x.mean((2, 3)), (16, 256, 56, 56), dtype=dtype)
    yield case("prelu 4096x4096", F.prelu, (4096, 4096), (4096,), dtype=dtype)
    yield case("mul broadcast", torch.mul, (8, 1024, 512), (512,), dtype=dtype)
    yield case("sum0 strided", lambda x: x.t().sum(1), (8192, 256), dtype=dtype)
    yield case("sum0 offset", lambda x: x[:, 1:].sum(0), (8192, 257), dtype=dtype)


def _losses(dtype: torch.dtype) -> Iterator[Case]:
    pair = {
        "mse": F.mse_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss, "l1": F.l1_loss, "kl_div": F.kl_div,
        "bce": F.binary_cross_entropy, "bce_logits": F.binary_cross_entropy_with_logits, "soft_margin": F.soft_margin_loss,
    }  # fmt: skip
    for name, loss in pair.items():
        for rows, cols in ((2048, 512), (3000, 1000), (64, 10)):
            yield (
                f"{name} {rows}x{cols}",
                lambda rows=rows, cols=cols: [new(rows, cols, dtype=dtype), new(rows, cols, dtype=dtype, grad=False)],
                loss,
            )
    for rows, cols in ((2048, 32000), (512, 1000), (64, 10)):
        yield case(f"cross_entropy {rows}x{cols}", F.cross_entropy, (rows, cols), [rows], dtype=dtype)
    yield case("cross_entropy 2d", F.cross_entropy, (4, 21, 128, 128), [4, 128, 128], dtype=dtype)
    yield case("smoothed", lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1), (512, 1000), [512], dtype=dtype)


def _elementwise(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((4, 16, 256, 256), (300, 130), (64, 8192), (128, 33)):
        yield case(f"softmax {shape}", lambda x: x.softmax(-1), shape, dtype=dtype)
        yield case(f"log_softmax {shape}", lambda x: x.log_softmax(-1), shape, dtype=dtype)
        yield case(f"logsumexp {shape}", lambda x: x.logsumexp(-1), shape, dtype=dtype)
    yield case("softmax dim 1", lambda x: x.softmax(1), (8, 64, 1024), dtype=dtype)
    for name, call in {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "dropout": F.dropout, "glu": F.glu}.items():
        yield case(name, call, (2048, 1024), dtype=dtype)
    yield case("where", lambda x: torch.where(x > 0, x, x * 2).masked_fill(x < 0, 0.0), (2048, 1024), dtype=dtype)


def _norms(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((4, 32, 64, 64), (16, 64, 56, 56), (8, 3, 28, 28), (32, 512, 7, 7), (64, 48, 14, 14)):
        for nhwc in (False, True):
            yield (
                f"batch_norm {shape} nhwc={nhwc}",
                lambda s=shape, last=nhwc: [new(*s, dtype=dtype, nhwc=last), new(s[1]), new(s[1])],
                lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
            )
    for rows, cols in ((4096, 1024), (512, 768), (65536, 96)):
        yield case(
            f"layer_norm {rows}x{cols}",
            lambda x, w, b: F.layer_norm(x, w.shape, w, b),
            (rows, cols),
            (cols,),
            (cols,),
            dtype=dtype,
        )
        yield case(
            f"layer_norm of a transpose {rows}x{cols}",
            lambda x, w, b: F.layer_norm(x.t(), w.shape, w, b).t(),
            (cols, rows),
            (cols,),
            (cols,),
            dtype=dtype,
        )
        yield case(
            f"rms_norm of a transpose {rows}x{cols}",
            lambda x, w: F.rms_norm(x.t(), w.shape, w, 1e-5).t(),
            (cols, rows),
            (cols,),
            dtype=dtype,
        )
        yield case(
            f"rms_norm {rows}x{cols}", lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), (rows, cols), (cols,), dtype=dtype
        )
    for shape in ((8, 64, 64, 64), (4, 320, 32, 32), (16, 32, 7, 7)):
        c = shape[1]
        yield case(f"group_norm {shape}", lambda x, w, b: F.group_norm(x, 8, w, b), shape, (c,), (c,), dtype=dtype)
        yield (
            f"batch_norm {shape}",
            lambda shape=shape, c=c: [new(*shape, dtype=dtype), new(c), new(c), new(c, grad=False), new(c, grad=False)],
            lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True),
        )


def _attention(dtype: torch.dtype) -> Iterator[Case]:
    sdpa = F.scaled_dot_product_attention
    for b, h, s, d in ((8, 12, 197, 64), (4, 16, 1024, 64), (2, 8, 512, 80), (2, 8, 640, 128), (1, 4, 300, 96)):
        qkv = [(b, h, s, d)] * 3
        yield case(f"sdpa {b}x{h}x{s}x{d}", sdpa, *qkv, dtype=dtype)
        yield case(
            f"sdpa causal dropout {b}x{h}x{s}x{d}", lambda q, k, v: sdpa(q, k, v, None, 0.1, True), *qkv, dtype=dtype
        )
        yield case(
            f"sdpa mask dropout {b}x{h}x{s}x{d}",
            lambda q, k, v: sdpa(q, k, v, q.new_zeros(q.shape[0], 1, q.shape[2], q.shape[2]), 0.1),
            *qkv,
            dtype=dtype,
        )
        yield case(
            f"sdpa dropout of views {b}x{h}x{s}x{d}",
            lambda x: sdpa(*x.permute(2, 0, 3, 1, 4).unbind(0), dropout_p=0.1),
            (b, s, 3, h, d),
            dtype=dtype,
        )


def _convolutions(dtype: torch.dtype) -> Iterator[Case]:
    for nhwc in (False, True):
        for n, c, o, hw in ((8, 64, 64, 56), (4, 128, 256, 28)):
            conv = lambda x, w, b: F.conv2d(x, w, b, padding=1)  # noqa: E731
            yield (
                f"conv {n}x{c}x{hw} to {o} nhwc={nhwc}",
                lambda n=n, c=c, o=o, hw=hw, nhwc=nhwc: [
                    new(n, c, hw, hw, dtype=dtype, nhwc=nhwc),
                    new(o, c, 3, 3, dtype=dtype, nhwc=nhwc),
                    new(o, dtype=dtype),
                ],
                conv,
            )
            yield (
                f"conv {n}x{c}x{hw} to {o} nhwc={nhwc}, w contiguous",
                lambda n=n, c=c, o=o, hw=hw, nhwc=nhwc: [
                    new(n, c, hw, hw, dtype=dtype, nhwc=nhwc),
                    new(o, c, 3, 3, dtype=dtype),
                ],
                lambda x, w: F.conv2d(x, w, padding=1),
            )
    yield case(
        "depthwise",
        lambda x, w, b: F.conv2d(x, w, b, padding=3, groups=64),
        (8, 64, 56, 56),
        (64, 1, 7, 7),
        (64,),
        dtype=dtype,
    )
    yield case(
        "conv transpose",
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2),
        (8, 64, 28, 28),
        (64, 32, 2, 2),
        (32,),
        dtype=dtype,
    )
    yield case("conv1d", lambda x, w: F.conv1d(x, w, padding=1), (8, 64, 1024), (64, 64, 3), dtype=dtype)
    yield case("conv3d", lambda x, w: F.conv3d(x, w, padding=1), (2, 16, 16, 32, 32), (16, 16, 3, 3, 3), dtype=dtype)


def _indexing(dtype: torch.dtype) -> Iterator[Case]:
    for count, width in ((2048, 1024), (3072, 256), (3073, 256), (8192, 512), (16384, 768)):
        yield case(
            f"embedding {count} of 32000x{width}", lambda w, i: F.embedding(i, w), (32000, width), [count], dtype=dtype
        )
    for count in (1024, 4096, 10000):
        yield case(f"x[i] {count}", lambda x, i: x[i], (4096, 256), [count], dtype=dtype)
        yield case(
            f"index_put {count}",
            lambda x, i: x.new_zeros(4096, 256).index_put((i,), x, accumulate=True),
            (count, 256),
            [count],
            dtype=dtype,
        )
        yield case(f"index_select {count}", lambda x, i: x.index_select(0, i), (4096, 256), [count], dtype=dtype)
        yield case(
            f"index_add {count}",
            lambda x, i: x.new_zeros(4096, 256).index_add(0, i, x),
            (count, 256),
            [count],
            dtype=dtype,
        )
        yield case(f"gather {count}", lambda x, i: x.gather(0, i), (4096, 64), [count, 64], dtype=dtype)
        yield case(
            f"scatter_add {count}",
            lambda x, i: x.new_zeros(4096, 64).scatter_add(0, i, x),
            (count, 64),
            [count, 64],
            dtype=dtype,
        )
    yield case("embedding_bag", lambda w, i: F.embedding_bag(i, w), (32000, 128), [512, 8], dtype=dtype)
    for shape in ((64, 65536), (4096, 512), (1, 100000), (16, 20000), (512, 1024), (512, 1025), (8, 4097)):
        yield case(f"sort {shape}", lambda x: x.sort(-1)[0], shape, dtype=dtype)
        yield case(f"topk {shape}", lambda x: x.topk(10)[0], shape, dtype=dtype)
        yield case(f"cumsum {shape}", lambda x: x.cumsum(-1), shape, dtype=dtype)
    for shape in ((2, 8, 8), (4, 56, 56, 96), (4, 28, 28, 192), (16, 14, 14, 384), (300, 130)):
        for dims in ((0,), (0, 1), tuple(range(len(shape)))):
            yield case(f"roll {shape} by {dims}", lambda x, d=dims: x.roll((1,) * len(d), d), shape, dtype=dtype)
        yield case(f"roll transposed {shape}", lambda x: x.transpose(0, 1).roll(1, 0), shape, dtype=dtype)
    yield case("cumsum 1d", lambda x: x.cumsum(0), (1 << 20,), dtype=dtype)


def _rest(dtype: torch.dtype) -> Iterator[Case]:
    image = (4, 32, 64, 64)
    calls = {
        "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1), "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 7),
        "avg_pool": lambda x: F.avg_pool2d(x, 2), "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "nearest": lambda x: F.interpolate(x, scale_factor=2), "reflect": lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
        "replicate": lambda x: F.pad(x, (2, 2, 2, 2), mode="replicate"), "zeros": lambda x: F.pad(x, (2, 2, 2, 2)),
    }  # fmt: skip
    for name, call in calls.items():
        yield case(name, call, image, dtype=dtype)
    yield case("bmm", torch.bmm, (64, 256, 64), (64, 64, 256), dtype=dtype)
    for name, call in {"mm": torch.mm, "matmul": torch.matmul}.items():  # the gradient of a sum is expanded
        yield case(f"{name}, summed", lambda a, b, call=call: call(a, b).sum(), (512, 256), (256, 384), dtype=dtype)
    yield case("bmm, summed", lambda a, b: torch.bmm(a, b).sum(), (16, 64, 32), (16, 32, 96), dtype=dtype)
    for groups, rows, width in ((4, 256, 64), (8, 1024, 128), (64, 4096, 256)):
        each = torch.arange(1, groups + 1, dtype=torch.int32) * (rows // groups)
        yield case(
            f"grouped_mm {groups}x{rows}x{width}",
            lambda a, b, ends=each: F.grouped_mm(a, b, offs=ends.to(a.device)),
            (rows, width), (groups, width, 2 * width), dtype=dtype,
        )  # fmt: skip
    yield case("baddbmm", torch.baddbmm, (16, 64, 96), (16, 64, 32), (16, 32, 96), dtype=dtype)
    yield case("mv", torch.mv, (512, 256), (256,), dtype=dtype)
    yield case("dot", torch.dot, (4096,), (4096,), dtype=dtype)
    yield case("amin, argmin", lambda x: x.amin(0) + x.argmin(0) + x.argmax(0), (8192, 256), dtype=dtype)
    yield case("min", lambda x: x.min(0)[0], (8192, 256), dtype=dtype)
    yield case("var_mean", lambda x: sum(torch.var_mean(x, 0)) + sum(torch.std_mean(x, 0)), (8192, 256), dtype=dtype)
    yield case("nansum", lambda x: x.nansum(0), (8192, 256), dtype=dtype)
    yield case("logcumsumexp", lambda x: x.logcumsumexp(0), (1 << 18,), dtype=dtype)
    yield case("einsum", lambda a, b: torch.einsum("bsd,dhk->bhsk", a, b), (8, 64, 512), (512, 16, 32), dtype=dtype)
    yield case("grid_sample", lambda a, b: F.grid_sample(a, b, align_corners=False), image, (4, 64, 64, 2), dtype=dtype)


def _autocast() -> Iterator[Case]:
    def under(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.autocast("cuda", F16)(call)

    yield case("autocast linear", under(F.linear), (4096, 1024), (4096, 1024), (4096,))
    yield case("autocast conv", under(lambda x, w: F.conv2d(x, w, padding=1)), (8, 64, 56, 56), (64, 64, 3, 3))
    yield case(
        "autocast layer_norm", under(lambda x, w, b: F.layer_norm(x, w.shape, w, b)), (4096, 1024), (1024,), (1024,)
    )
    yield case("autocast cross_entropy", under(F.cross_entropy), (2048, 32000), [2048])
