"""Loops of Lightning, and plain loops of torch: averages of weights, functional calls, derivatives of gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.framework_loops.loop import OPTIONS, Run, loop

WIDTH = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1, self.training)
        return self.head(self.norm(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


# -- Lightning -----------------------------------------------------------------------------------------------------------


def task(run: Run, how: str, *, keeps_losses: bool = False) -> Any:
    """Return a LightningModule around :func:`net`, optimized in one of three ways, which may keep a list of its losses."""
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = net()
            self.losses: list[float] = []
            if how == "init":
                self.net = run.optimize(self.net)

        def configure_model(self) -> None:
            if how == "configure_model":
                run.optimize_(self.net)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True)
            if keeps_losses:
                self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.note(outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    run.begin(made := Task())
    return made


def fit(run: Run, made: Any, **options: Any) -> None:
    import lightning

    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(512, WIDTH), torch.randint(0, 8, (512,)))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.folder,
        **options,
    )
    torch.manual_seed(2)
    trainer.fit(made, torch.utils.data.DataLoader(data, batch_size=64))
    trainer.save_checkpoint(run.folder / "last.ckpt")


@loop("Lightning", "the network optimized in __init__")
def in_init(run: Run) -> None:
    fit(run, task(run, "init"))


@loop("Lightning", "configure_model")
def in_configure_model(run: Run) -> None:
    fit(run, task(run, "configure_model"))


@loop("Lightning", 'the LightningModule whole: methods=("forward", "training_step")')
def whole(run: Run) -> None:
    made = task(run, "")
    run.optimize_(made, methods=("forward", "training_step"))
    fit(run, made)


@loop("Lightning", "FxMemCallback")
def callback(run: Run) -> None:
    made = task(run, "")
    fit(run, made, callbacks=_callbacks(run, made))


@loop("Lightning", "FxMemCallback, a list of losses, bf16-mixed, accumulation")
def callback_in_parts(run: Run) -> None:
    made = task(run, "", keeps_losses=True)
    fit(run, made, precision="bf16-mixed", accumulate_grad_batches=2, callbacks=_callbacks(run, made))


def _callbacks(run: Run, made: Any) -> list[Any]:
    from fxmem.integrations.lightning import FxMemCallback

    return run.callbacks(FxMemCallback, made)


@loop("Lightning", "bf16-mixed")
def mixed(run: Run) -> None:
    fit(run, task(run, "init"), precision="bf16-mixed")


@loop("Lightning", "accumulate_grad_batches")
def accumulated(run: Run) -> None:
    fit(run, task(run, "init"), accumulate_grad_batches=2)


@loop("Lightning", "EMAWeightAveraging")
def averaged(run: Run) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    fit(run, task(run, "init"), callbacks=[EMAWeightAveraging()])


@loop("Lightning", "ModelCheckpoint, resume")
def resumed(run: Run) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    fit(run, task(run, "init"), callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)])
    import lightning

    made = task(run, "init")
    data = torch.utils.data.TensorDataset(torch.randn(512, WIDTH), torch.randint(0, 8, (512,)))
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=6, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    torch.manual_seed(3)
    trainer.fit(made, torch.utils.data.DataLoader(data, batch_size=64), ckpt_path=run.folder / "last.ckpt")


# -- torch's own -----------------------------------------------------------------------------------------------------------


def batches(num: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(64, WIDTH), torch.randint(0, 8, (64,))) for _ in range(num)]


@loop("torch", "autocast, GradScaler, clipping")
def amp(run: Run) -> None:
    model = run.optimize(net())
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu")
    for x, y in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.note(loss)


@loop("torch", "AveragedModel (EMA), state_dict saved")
def swa(run: Run) -> None:
    model = run.optimize(net())
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        run.note(loss)
    torch.save(average.state_dict(), run.folder / "average.pt")


@loop("torch", "gradient accumulation")
def micro_batches(run: Run) -> None:
    model = run.optimize(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for k, (x, y) in enumerate(batches(8)):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        run.note(loss)
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()


@loop("torch", "siamese: two forwards, one backward", share=0.8)
def siamese(run: Run) -> None:
    model = run.optimize(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, _ in batches():
        loss = -F.cosine_similarity(model(x), model(x + 0.1)).mean()
        loss.backward()
        run.note(loss)
        optimizer.step()
        optimizer.zero_grad()


def adversaries(run: Run, budget: str) -> None:
    import fxmem

    generator, critic = net(), net()
    both = nn.ModuleList([generator, critic])
    if run.budget_bytes is not None:
        both = nn.ModuleList([fxmem.optimize(part, budget=budget, **OPTIONS) for part in both])
    run.begin(both)
    generator, critic = both
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in both]
    widen = torch.randn(8, WIDTH)
    for x, _ in batches():
        made = generator(x) @ widen
        loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(x)).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        fooled = F.softplus(-critic(made)).mean()
        fooled.backward()
        optimizers[0].step()
        both.zero_grad()
        run.note(loss, fooled)


@loop("torch", "GAN: two models, each in the other's loss", share=0.9, remedy=lambda run: adversaries(run, "62%"))
def gan(run: Run) -> None:
    adversaries(run, "60%")


@loop("torch", "penalty on a gradient (create_graph)", share=1.0)
def penalty(run: Run) -> None:
    model = run.optimize(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches():
        x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        run.note(loss)
        optimizer.step()
        optimizer.zero_grad()


# -- functional calls ------------------------------------------------------------------------------------------------------


def maml(run: Run, model: nn.Module, inner: nn.Module) -> None:
    """Adapt ``inner`` by one step for each batch; the outer step is of ``model``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, y in batches():
        weights = dict(model.named_parameters())
        loss = F.cross_entropy(torch.func.functional_call(inner, weights, (x,)), y)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        outer = F.cross_entropy(torch.func.functional_call(inner, adapted, (x,)), y)
        outer.backward()
        run.note(outer)
        optimizer.step()
        optimizer.zero_grad()


def _maml_as_refused(run: Run) -> None:
    model = run.optimize(net())
    maml(run, model, model if run.budget_bytes is None else model.fxmem.original)


@loop("torch.func", "MAML by functional_call", share=1.0, remedy=_maml_as_refused)
def maml_by_functional_call(run: Run) -> None:
    model = run.optimize(net())
    maml(run, model, model)


def _per_sample(run: Run, model: nn.Module, inner: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        weights = {name: p.detach() for name, p in model.named_parameters()}
        buffers = {name: b.clone() for name, b in model.named_buffers()}

        def loss_of(weights: Any, x: Tensor = x, y: Tensor = y, buffers: Any = buffers) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(inner, {**weights, **buffers}, (x,)), y)

        gradients = torch.func.grad(loss_of)(weights)
        run.note(*gradients.values())
        optimizer.step()
        optimizer.zero_grad()


def _grad_as_refused(run: Run) -> None:
    model = run.optimize(net())
    _per_sample(run, model, model if run.budget_bytes is None else model.fxmem.original)


@loop("torch.func", "grad of a functional_call", remedy=_grad_as_refused)
def per_sample(run: Run) -> None:
    model = run.optimize(net())
    _per_sample(run, model, model)
