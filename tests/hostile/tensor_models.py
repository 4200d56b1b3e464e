"""Bodies of hostile models: in-place ops, views, aliases, integers, dtypes."""

from typing import Any

import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor

from tests.hostile.sizes import WIDTH

# -- the user's own in-place ops, views and aliases --------------------------------------------------------------------


def relu_in_place(m: Any, x: Tensor) -> Tensor:
    return torch.relu_(x * m.scale)


def in_place_on_saved_clone(m: Any, x: Tensor) -> Tensor:
    y = x.exp()
    return y * y.clone().mul_(m.scale).add_(1)


def augmented_assignment(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    y += x
    y *= 2
    y -= m.mean
    return y


def assign_a_column(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    y[:, 0] = x[:, 1] * 2
    y[:, 2:4] = 0.5
    return y


def assign_by_mask(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    y[x > 0] = 0.25
    return y


def assign_rows_into_zeros(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i in range(x.shape[0]):
        out[i] = (x[i] * m.scale).tanh()
    return out


def in_place_on_a_view(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    y.view(2, 2, WIDTH)[0].mul_(3)
    y.t()[1].add_(x[:, 0])
    return y


def in_place_after_a_view_was_taken(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    head = y[:, :4]
    y.mul_(2)
    return torch.cat([head, y[:, 4:]], 1) * y


def in_place_interleaved(m: Any, x: Tensor) -> Tensor:
    a, b = x * 2, x * 3
    a.add_(b)
    b.add_(a)
    a.mul_(b.detach())
    return a + b


def scatter_and_index_add(m: Any, x: Tensor) -> Tensor:
    index = torch.tensor([0, 2, 1, 3])
    y = torch.zeros_like(x).index_add_(0, index, x * m.scale)
    return y.scatter_add(0, index[:, None].expand(4, WIDTH), x) + y.index_select(0, index)


def masked_fill_and_where(m: Any, x: Tensor) -> Tensor:
    y = (x * m.scale).masked_fill_(x > 0.3, -1.0)
    return torch.where(y > -1, y.exp(), y)


def fill_and_zero_and_copy(m: Any, x: Tensor) -> Tensor:
    y = torch.empty_like(x).fill_(2.0)
    z = torch.empty_like(x).copy_(x * m.scale)
    return z * y + x.clone().zero_()


def views_of_views(m: Any, x: Tensor) -> Tensor:
    y = (x * m.scale).view(2, 2, WIDTH).transpose(0, 1)[:, :, ::2].unsqueeze(-1).expand(2, 2, 4, 2)
    return y.reshape(4, WIDTH).exp()


def expand_and_broadcast(m: Any, x: Tensor) -> Tensor:
    wide = x[:, :1].exp().expand(4, WIDTH)
    return wide * x + m.scale.expand(4, WIDTH).sigmoid()


def split_chunk_unbind(m: Any, x: Tensor) -> Tensor:
    a, b = x.exp().split([3, 5], 1)
    c, d = (x * m.scale).chunk(2, 0)
    rows = x.tanh().unbind(0)
    return torch.cat([a, b], 1) * torch.stack(rows) + torch.cat([d, c])


def unsafe_splits(m: Any, x: Tensor) -> Tensor:
    a, b = torch.unsafe_chunk(x * m.scale, 2, 1)
    return torch.cat([a.sigmoid() * b.tanh(), b.exp()], 1)


def complex_numbers(m: Any, x: Tensor) -> Tensor:
    z = torch.complex(x, x * m.scale)
    spectrum = torch.fft.fft(z.exp()) * torch.polar(m.scale, x)
    return torch.fft.ifft(spectrum.conj()).abs() + torch.view_as_real(z * z.conj()).sum(-1) + spectrum.imag


def real_fft(m: Any, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x * m.scale) * 2j, n=WIDTH)


def negative_and_conj_views(m: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(torch.stack([x, x * m.scale], -1))
    return (z.conj().imag * z.real).exp() + z.mH.resolve_conj().real.t()


def strided_and_as_strided(m: Any, x: Tensor) -> Tensor:
    y = (x * m.scale).t().contiguous().t()
    return torch.as_strided(y.exp(), (4, WIDTH), (1, 4)) * y[:, torch.arange(WIDTH)].flip(0)


def overlapping_windows(m: Any, x: Tensor) -> Tensor:
    return (x * m.scale).unfold(1, 3, 1).exp().sum(-1).repeat(1, 2)[:, :WIDTH]


def channels_last(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x.view(1, 4, 2, 4).contiguous(memory_format=torch.channels_last))
    return y.relu().permute(0, 2, 3, 1).reshape(4, WIDTH)


def one_value_saved_by_many(m: Any, x: Tensor) -> Tensor:
    y = x.exp()
    return y * y + y.sin() + y.pow(3) + F.linear(y, m.last.weight) + torch.outer(y[0], y[1])[:4]


def zero_sized(m: Any, x: Tensor) -> Tensor:
    return torch.cat([x[:0].exp(), x * m.scale], 0) + x[:, :0].exp().sum()


def scalars_and_zero_dim(m: Any, x: Tensor) -> Tensor:
    return x * x.mean().exp() + m.scale.sum() * x.norm() + x.std()


def detached_branch(m: Any, x: Tensor) -> Tensor:
    return x * x.exp().detach() + x.detach() * m.scale


def no_grad_inside(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        weights = (x * m.scale).softmax(-1)
        m.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return weights * x + m.mean


def grad_reenabled_inside(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = (x * m.scale).exp()
    return z * y


# -- integer and boolean paths, sorting, dtypes ------------------------------------------------------------------------


def integer_and_bool_paths(m: Any, x: Tensor) -> Tensor:
    order = x.argsort(1)
    positive = (x > 0) & (x < 1) | x.isnan()
    kinds = positive.long().cumsum(1).remainder(3)
    return x.gather(1, order) * positive + m.scale[kinds] * F.one_hot(kinds, 3).sum(-1)


def sort_topk_cummax(m: Any, x: Tensor) -> Tensor:
    values, _ = x.sort(1)
    top, where = (x * m.scale).topk(4, 1)
    running, _ = x.cummax(1)
    best, _ = x.max(1, keepdim=True)
    return values + running * best + torch.zeros_like(x).scatter(1, where, top) + x.median(1, keepdim=True)[0]


def half_and_double(m: Any, x: Tensor) -> Tensor:
    y = (x.double() * m.scale).exp().float()
    return y + (x.bfloat16() @ m.first.weight.bfloat16()).float().tanh() + x.half().sigmoid().float()


def einsum_and_matmuls(m: Any, x: Tensor) -> Tensor:
    y = torch.einsum("bi,bj->bij", x, x * m.scale)
    return torch.bmm(y, y.mT).sum(1).tanh() + torch.baddbmm(y, y, y)[:, 0] + torch.addmm(m.scale, x, m.first.weight)


def linear_algebra(m: Any, x: Tensor) -> Tensor:
    square = x.mT @ x + 3 * torch.eye(WIDTH)
    return torch.linalg.solve(square, x.mT).mT + torch.linalg.cholesky(square)[:4] + torch.logdet(square)
