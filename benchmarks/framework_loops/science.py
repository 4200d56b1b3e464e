"""Loops of PyG, wav2vec2, torchdiffeq, snntorch, vector-quantize-pytorch and e3nn."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.framework_loops.loop import Run, loop
from benchmarks.framework_loops.vision import steps

WIDTH = 16


# -- graphs --------------------------------------------------------------------------------------------------------------


def graph() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(128, WIDTH), torch.randint(0, 128, (2, 600)), torch.randint(0, 4, (128,))


def message_passing(run: Run, kind: str, *, loops_outside: bool = False, **options: Any) -> None:
    import torch_geometric.nn as pyg
    from torch_geometric.utils import add_self_loops, remove_self_loops

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv = getattr(pyg, kind)
            self.layers = nn.ModuleList(conv(WIDTH, WIDTH, **options) for _ in range(3))
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.dropout(layer(x, edges).relu(), 0.1, self.training)
            return self.head(x)

    torch.manual_seed(0)
    x, edges, y = graph()
    if loops_outside:
        edges, _ = add_self_loops(remove_self_loops(edges)[0], num_nodes=len(x))
    steps(run, run.optimize(Net().train()), lambda model: F.cross_entropy(model(x, edges), y))


def _with_loops_outside(run: Run, kind: str) -> None:
    message_passing(run, kind, loops_outside=True, add_self_loops=False)


@loop("PyG", "GCNConv (add_self_loops)", remedy=lambda run: _with_loops_outside(run, "GCNConv"))
def gcn(run: Run) -> None:
    message_passing(run, "GCNConv")


@loop("PyG", "GATConv (add_self_loops)", remedy=lambda run: _with_loops_outside(run, "GATConv"))
def gat(run: Run) -> None:
    message_passing(run, "GATConv")


@loop("PyG", "SAGEConv", share=0.8)
def sage(run: Run) -> None:
    message_passing(run, "SAGEConv")


# -- speech --------------------------------------------------------------------------------------------------------------


def speech(run: Run, **options: Any) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 16,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "conv_dim": (16, 16),
        "conv_stride": (5, 4),
        "conv_kernel": (10, 8),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "ctc_loss_reduction": "mean",
        "pad_token_id": 0,
    }
    model = run.optimize(Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **options)).train())
    waves, labels = torch.randn(2, 2000), torch.randint(1, 16, (2, 12))
    steps(run, model, lambda model: model(waves, labels=labels).loss)
    model.save_pretrained(run.folder)


@loop("transformers wav2vec2", "CTC, no masks")
def ctc(run: Run) -> None:
    speech(run, apply_spec_augment=False, layerdrop=0.0)


@loop("transformers wav2vec2", "CTC, SpecAugment and LayerDrop (its defaults)")
def ctc_as_it_is(run: Run) -> None:
    speech(run, mask_time_length=4)


# -- differential equations, spikes, codes, symmetries ---------------------------------------------------------------------


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.net(x)


class Flow(nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.field, self.head, self.method = Field(), nn.Linear(WIDTH, 4), method

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        from torchdiffeq import odeint

        return self.head(odeint(self.field, x, times, method=self.method)[-1])


def ode(run: Run, method: str) -> None:
    torch.manual_seed(0)
    model = run.optimize(Flow(method).train())
    x, y, times = torch.randn(32, WIDTH), torch.randint(0, 4, (32,)), torch.linspace(0, 1, 6)
    steps(run, model, lambda model: F.cross_entropy(model(x, times), y))


@loop("torchdiffeq", "odeint, rk4")
def fixed_steps(run: Run) -> None:
    ode(run, "rk4")


@loop("torchdiffeq", "odeint, dopri5 (its steps depend on values)", share=0.9)
def adaptive_steps(run: Run) -> None:
    ode(run, "dopri5")


@loop("snntorch", "Leaky neurons, 10 steps of time")
def spikes(run: Run) -> None:
    import snntorch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, 4)
            self.first, self.second = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.9)

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.first.init_leaky(), self.second.init_leaky()
            spoken = []
            for _ in range(10):
                spike, one = self.first(self.up(x), one)
                spike, two = self.second(self.down(spike), two)
                spoken.append(two)
            return torch.stack(spoken).mean(0)

    torch.manual_seed(0)
    x, y, net = torch.rand(32, WIDTH), torch.randint(0, 4, (32,)), Net().train()
    steps(run, run.optimize(net), lambda model: F.cross_entropy(model(x), y))


def coded(run: Run, quantizer: nn.Module) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
            self.quantizer = quantizer
            self.decode = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found, *_, commitment = self.quantizer(self.encode(x))
            return self.decode(found), commitment

    x = torch.randn(8, 32, WIDTH)

    def loss_of(model: nn.Module) -> Tensor:
        found, commitment = model(x)
        return F.mse_loss(found, x) + commitment.sum()

    steps(run, run.optimize(Net().train()), loss_of)


@loop("vector-quantize-pytorch", "VectorQuantize (codes move by averages)", share=0.85)
def vector_quantize(run: Run) -> None:
    from vector_quantize_pytorch import VectorQuantize

    torch.manual_seed(0)
    coded(run, VectorQuantize(dim=WIDTH, codebook_size=32))


@loop("vector-quantize-pytorch", "VectorQuantize, kmeans_init, dead codes replaced", share=0.85)
def vector_quantize_kmeans(run: Run) -> None:
    from vector_quantize_pytorch import VectorQuantize

    torch.manual_seed(0)
    coded(run, VectorQuantize(dim=WIDTH, codebook_size=32, kmeans_init=True, threshold_ema_dead_code=2))


@loop("e3nn", "FullyConnectedTensorProduct, Gate", share=0.85)
def equivariant(run: Run) -> None:
    from e3nn import o3
    from e3nn.nn import Gate

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = o3.Irreps("8x0e + 4x1o")
            self.gate = Gate("8x0e", [F.silu], "4x0e", [torch.sigmoid], "4x1o")
            self.sphere = o3.Irreps.spherical_harmonics(2)
            self.first = o3.FullyConnectedTensorProduct(kinds, self.sphere, self.gate.irreps_in)
            self.second = o3.FullyConnectedTensorProduct(kinds, self.sphere, "1x0e")

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            directions = o3.spherical_harmonics(self.sphere, places, True, "component")
            return self.second(self.gate(self.first(x, directions)), directions)

    torch.manual_seed(0)
    x, places, y = torch.randn(64, 20), torch.randn(64, 3), torch.randn(64, 1)
    steps(run, run.optimize(Net().train()), lambda model: F.mse_loss(model(x, places), y))
