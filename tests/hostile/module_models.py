"""Bodies of hostile models: randomness, modules, parameters and buffers."""

from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hostile.sizes import WIDTH

# -- randomness --------------------------------------------------------------------------------------------------------


def dropouts(m: Any, x: Tensor) -> Tensor:
    y = F.dropout(x * m.scale, 0.3).exp()
    y = F.alpha_dropout(y, 0.2, training=True) + F.feature_alpha_dropout(y, 0.2, training=True)
    return F.dropout1d(y.view(4, 2, 4), 0.4).view(4, WIDTH) * F.dropout(x, 0.1, inplace=False)


def dropout_in_place(m: Any, x: Tensor) -> Tensor:
    return F.dropout(x * m.scale, 0.5, inplace=True).exp()


def attention_dropout(m: Any, x: Tensor) -> Tensor:
    q = x.view(1, 4, WIDTH)
    return F.scaled_dot_product_attention(q, q * m.scale, q, dropout_p=0.4)[0].exp()


def random_ops(m: Any, x: Tensor) -> Tensor:
    noise = torch.rand_like(x) + torch.randn_like(x) + torch.rand(WIDTH) + torch.empty_like(x).uniform_(0, 1)
    noise = noise + torch.bernoulli(torch.full_like(x, 0.5)) + torch.randint(3, (4, 1)) + torch.randperm(WIDTH)
    noise = (
        noise * torch.empty_like(x).bernoulli_(0.7) + torch.normal(x.detach(), 1.0) + torch.poisson(x.detach().abs())
    )
    return (x * noise).exp().clamp(max=10) * m.scale + torch.empty_like(x).exponential_()


def sampled_indices(m: Any, x: Tensor) -> Tensor:
    chosen = torch.multinomial(x.detach().softmax(-1), 3)
    return x + x.gather(1, chosen).exp().sum(1, keepdim=True)


def gumbel_softmax(m: Any, x: Tensor) -> Tensor:
    return F.gumbel_softmax(x * m.scale, hard=True) * x + F.rrelu(x, training=True)


def stochastic_depth(m: Any, x: Tensor) -> Tensor:
    keep = torch.empty(4, 1).bernoulli_(0.5).div_(0.5)
    return x + (x * m.scale).exp() * keep


def reparameterized_sample(m: Any, x: Tensor) -> Tensor:
    return torch.distributions.Normal(x, m.scale.abs()).rsample().exp()


def draws_a_random_tensor_in_place(m: Any, x: Tensor) -> Tensor:
    return (x * m.scale).add_(torch.randn(4, WIDTH).mul_(0.1)).sigmoid()


# -- modules, parameters and buffers -----------------------------------------------------------------------------------


def module_used_twice(m: Any, x: Tensor) -> Tensor:
    return m.parts[0](m.parts[0](x).tanh()) + m.first(x)


def tied_weights(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.first(x).tanh(), m.first.weight.t()) + F.linear(x, m.last.weight)


def parameter_as_a_value(m: Any, x: Tensor) -> Tensor:
    return x * m.scale.exp() + torch.stack([m.scale, m.scale * 2]).sum(0) + m.scale


def batch_norm_1d(m: Any, x: Tensor) -> Tensor:
    return m.parts[0](x).relu() + m.parts[1](m.parts[0](x * 2)).exp()


def batch_norm_2d_3d(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x.view(2, 2, 2, 4)).relu()
    return m.parts[1](y.view(2, 2, 2, 2, 2)).exp().view(4, WIDTH)


def running_counters(m: Any, x: Tensor) -> Tensor:
    m.count.add_(1)
    m.mean.lerp_(x.detach().mean(0), 0.1)
    return x * m.scale + m.mean.clone()


def ema_buffer_read_before_and_after(m: Any, x: Tensor) -> Tensor:
    before = x * m.mean.clone()
    with torch.no_grad():
        m.mean.mul_(0.5).add_(x.mean(0))
    return (before + 1).exp() * x + m.mean.clone()


def buffer_replaced(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + x.detach().mean(0)
    return x * m.scale + m.mean


def norm_in_eval_before_training(m: Any, x: Tensor) -> Tensor:
    norm = m.parts[0].eval()
    with torch.no_grad():
        target = norm(x).exp()
    first = norm(x).exp() * norm.running_mean.exp()
    second = norm.train()(x).exp()
    return (first * second + norm.running_var * target).sin()


def frozen_part(m: Any, x: Tensor) -> Tensor:
    return m.parts[0](x).relu() * m.scale


def frozen_linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def frozen_batch_norm() -> nn.Module:
    return nn.BatchNorm1d(WIDTH).eval().requires_grad_(False)


class LoRA(nn.Module):
    """Written by hand, as in the paper: a frozen linear and a trained low-rank update."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))


def first_part(m: Any, x: Tensor) -> Tensor:
    return m.parts[0](x).exp()


def recurrent(m: Any, x: Tensor) -> Tensor:
    y, _ = m.parts[0](x.view(2, 2, WIDTH))
    return y.reshape(4, WIDTH).exp()


def attention(m: Any, x: Tensor) -> Tensor:
    y, weights = m.parts[0](x[None], x[None], x[None])
    return y[0].exp() + weights.sum()


def embedding_bags(m: Any, x: Tensor) -> Tensor:
    words = torch.tensor([1, 2, 4, 5, 4, 3])
    return x * m.parts[0](words, torch.tensor([0, 1, 3, 4])) + m.parts[1](words[:4])


def parametrized_linear() -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).mT

    layer = nn.Linear(WIDTH, WIDTH)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda y: (m.parts[0](y) * m.scale).exp(), x, use_reentrant=False)


def outputs_alias_each_other(m: Any, x: Tensor) -> Any:
    y = x * m.scale
    return y, y, y.view(-1), y[0], {"transposed": y.t(), "sum": y.exp().sum()}


def outputs_include_a_parameter(m: Any, x: Tensor) -> Any:
    return {"y": (x * m.scale).exp(), "weight": m.scale, "view": m.first.weight[0], "buffer": m.mean}


def outputs_without_gradient(m: Any, x: Tensor) -> Any:
    y = x * m.scale
    return {"y": y.exp(), "argmax": y.argmax(-1), "detached": y.detach(), "none": None, "text": "a", "n": 3}


def output_modified_in_place_last(m: Any, x: Tensor) -> Any:
    y = (x * m.scale).exp()
    z = y + 1
    z.add_(x)
    return [z, (z.sin(), y)]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def named_tuple_output(m: Any, x: Tensor) -> Any:
    return Pair(x.exp(), x * m.scale)
