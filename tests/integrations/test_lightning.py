"""Lightning's Trainer: whole LightningModules inside a budget, with what they log."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from benchmarks.libraries import import_library

import_library("torchvision")
lightning = pytest.importorskip("lightning")
from fxmem.integrations.lightning import FxMemCallback  # noqa: E402

STEPS, ROWS, WIDTH = 4, 256, 32


class Net(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """Calls its submodules in ``training_step``, and logs there."""

    def __init__(self, returns_dict: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
        self.head, self.returns_dict = nn.Linear(WIDTH, 8), returns_dict

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.head(self.layers(x)), y)
        self.log("loss", loss)
        self.log_dict({"twice": 2 * loss, "one": 1.0})
        return {"loss": loss} if self.returns_dict else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Watch(lightning.Callback):  # type: ignore[name-defined, misc]
    """Notes what is logged, and the peak of each step."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.peaks: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.memory = fxmem.track(module, trainer.optimizers, batch)
        self.tracked = self.memory.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.memory.__exit__(None, None, None)
        self.peaks.append(self.tracked.peak_bytes)
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fitted(callbacks: list[Any], module: nn.Module, **options: Any) -> tuple[nn.Module, Watch]:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * ROWS, WIDTH), torch.randint(8, (STEPS * ROWS,)))
    watch = Watch()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch, *callbacks],
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=ROWS))
    return module, watch


def made(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_a_module_trains_with_the_callback_as_without_it(options: dict[str, Any]) -> None:
    eager, expected = fitted([], made(), **options)
    budget = int(0.6 * max(expected.peaks))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, found = fitted([FxMemCallback(budget=budget, cost="cpu")], made(), **options)
    assert found.logged == expected.logged
    assert expected.logged[0].keys() == {"loss", "twice", "one"}
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    planned = model.fxmem.methods["training_step"]
    assert max(found.peaks[1:]) <= budget  # the first has planning in it
    assert [str(w.message) for w in caught if "budget" in str(w.message)] == []
    if options.get("accumulate_grad_batches") is None:
        assert found.peaks[-1] == planned.report.predicted_peak_bytes + 16, "Lightning keeps four numbers of the log"
        assert len(planned.plans._caches) == 1, "the Trainer's loop is known"
    assert len(planned.plans.asked._compiled) == 1, "batch_idx is not used"


@pytest.mark.slow
def test_a_step_may_be_given_to_the_callback() -> None:
    step = fxmem.TrainingStep(optimizer="sgd")
    model, _ = fitted([FxMemCallback(budget="95%", step=step, cost="cpu")], made())
    assert model.fxmem.methods["training_step"].settings.step == step


@pytest.mark.slow
def test_a_step_that_returns_a_dict_is_planned_with_its_loss() -> None:
    eager, _ = fitted([], made(returns_dict=True))
    model, _ = fitted([FxMemCallback(budget="70%", cost="cpu")], made(returns_dict=True))
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


def test_a_module_that_calls_backward_itself_is_refused_with_the_way_to_go() -> None:
    module = made()
    module.automatic_optimization = False
    with pytest.raises(fxmem.InputError, match=r"optimize its networks in configure_model"):
        fitted([FxMemCallback(budget="70%")], module)


def test_a_module_that_holds_an_optimized_one_is_left_as_it_is() -> None:
    module = made()
    module.layers = fxmem.optimize(module.layers, budget=10**9)
    FxMemCallback(budget="70%").setup(None, module, "fit")
    assert type(module) is Net


def test_a_module_that_logs_is_not_compiled_but_the_network_in_it() -> None:
    with pytest.raises(fxmem.InputError, match="compile the network in it"):
        fitted([FxMemCallback(budget="2MB", backend="inductor")], made())
