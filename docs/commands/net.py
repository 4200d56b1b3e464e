"""The small network that the pages of the command line are about."""

from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, width: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
