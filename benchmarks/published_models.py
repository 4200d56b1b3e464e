"""The networks of published tables that torchvision lacks, as their authors describe them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.libraries import import_torchvision
from benchmarks.models import deep_resnet


def _conv(num_in: int, num_out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(num_in, num_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)]


def mobilenet_v1() -> nn.Module:
    """Return MobileNet (Howard et al. 2017, table 1), width 1."""
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    layers, width = _conv(3, 32, stride=2), 32
    for num_out, stride in plan:
        layers += [*_conv(width, width, stride=stride, groups=width), *_conv(width, num_out, kernel=1)]
        width = num_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


VGG16_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
CITYSCAPES_CLASSES = 19


def _vgg_stages(num_stages: int) -> nn.ModuleList:
    """The first stages of VGG-16, without BatchNorm and each with its pooling."""
    stages, width = nn.ModuleList(), 3
    for widths in VGG16_WIDTHS[:num_stages]:
        layers: list[nn.Module] = []
        for num_out in widths:
            layers += [nn.Conv2d(width, num_out, 3, padding=1), nn.ReLU(inplace=True)]
            width = num_out
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    return stages


def _conv_norm(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out))


def _up(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2)


class CheckmateUNet(nn.Module):
    """Checkmate's U-Net, ``vgg_unet`` of keras_segmentation: four stages of VGG-16 down, scores at half the resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = _vgg_stages(4)
        sizes = ((512, 512), (512 + 256, 256), (256 + 128, 128), (128 + 64, 64))
        self.up = nn.ModuleList(_conv_norm(*size) for size in sizes)
        self.head = nn.Conv2d(64, CITYSCAPES_CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for stage in self.stages:
            x = stage(x)
            skips.append(x)
        x = self.up[0](skips.pop())
        for conv in self.up[1:]:
            x = conv(torch.cat((_up(x), skips.pop()), 1))
        return self.head(x)


class CheckmateFCN8(nn.Module):
    """Checkmate's FCN8, ``fcn_8_vgg`` of keras_segmentation: VGG-16, two 4096-wide convolutions, scores of three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stages, classes = _vgg_stages(5), CITYSCAPES_CLASSES
        self.classifier = nn.Sequential(
            *(nn.Conv2d(512, 4096, 7, padding=3), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Conv2d(4096, 4096, 1), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Conv2d(4096, classes, 1),
        )
        self.score3, self.score4 = nn.Conv2d(256, classes, 1), nn.Conv2d(512, classes, 1)
        self.up5 = nn.ConvTranspose2d(classes, classes, 4, 2, bias=False)
        self.up4 = nn.ConvTranspose2d(classes, classes, 4, 2, bias=False)
        self.up3 = nn.ConvTranspose2d(classes, classes, 16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = []
        for stage in self.stages:
            x = stage(x)
            pooled.append(x)
        score4, score3 = self.score4(pooled[3]), self.score3(pooled[2])
        score4 = score4 + _cropped(self.up5(self.classifier(x)), score4)
        return self.up3(score3 + _cropped(self.up4(score4), score3))


def _cropped(x: Tensor, like: Tensor) -> Tensor:
    return x[..., : like.shape[-2], : like.shape[-1]]


class CheckmateSegNet(nn.Module):
    """Checkmate's SegNet, ``segnet`` of keras_segmentation: four convolutions down, four up, scores at half size."""

    def __init__(self) -> None:
        super().__init__()
        down, up = (3, 64, 128, 256, 256), (256, 512, 256, 128, 64)
        self.down = nn.ModuleList(_conv_norm(*size) for size in itertools.pairwise(down))
        self.up = nn.ModuleList(_conv_norm(*size) for size in itertools.pairwise(up))
        self.head = nn.Conv2d(64, CITYSCAPES_CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.down:
            x = F.max_pool2d(F.relu(conv(x), inplace=True), 2)
        x = self.up[0](x)
        for conv in self.up[1:]:
            x = conv(_up(x))
        return self.head(x)


class MonetUNet(nn.Module):
    """MONeT's U-Net: milesial's with halved bottleneck, enlarged by adaptive average pooling, one class."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 512)
        self.down = nn.ModuleList(_double_conv(a, b, b) for a, b in itertools.pairwise((3, *widths)))
        sizes = ((1024, 512, 256), (512, 256, 128), (256, 128, 64), (128, 64, 64))
        self.up = nn.ModuleList(_double_conv(*size) for size in sizes)
        self.head = nn.Conv2d(64, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.down[0](x)]
        for stage in self.down[1:]:
            skips.append(stage(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for stage in self.up:
            skip = skips.pop()
            x = stage(torch.cat((skip, F.adaptive_avg_pool2d(x, skip.shape[-2:])), 1))
        return self.head(x)


def _double_conv(num_in: int, num_mid: int, num_out: int) -> nn.Sequential:
    layers = [
        (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(True))
        for a, b in ((num_in, num_mid), (num_mid, num_out))
    ]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def resnet1000() -> nn.Module:
    """A 1000-layer pre-activation ResNet for 224x224 images: 333 bottlenecks in four stages, stem and classifier."""
    stem = nn.Sequential(*_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
    return deep_resnet((83, 83, 84, 83), (64, 128, 256, 512), 1000, stem)


def from_torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: import_torchvision().models.get_model(name, weights=None, **options)
