"""What is installed here, which devices there are, and which implementations of attention run."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from heedful import __version__
from heedful._result import Result
from heedful._text import quantity

# Extras that bundle others or serve those who work on heedful itself.
NOT_SHOWN = ("all", "dev", "docs")


@dataclass(frozen=True)
class Package(Result):
    """A dependency: its version, or how to get it."""

    name: str
    wanted: str
    version: str | None
    extra: str | None

    _also = ("remedy",)

    @property
    def remedy(self) -> str | None:
        """The command that installs it where it is missing."""
        if self.version is not None:
            return None
        return f"pip install 'heedful[{self.extra}]'" if self.extra else f"pip install '{self.name}{self.wanted}'"


@dataclass(frozen=True)
class Device:
    """A place to compute, or why it is not there."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True)
class Way:
    """An implementation of `attend`: the devices on which it ran just now, with this kernel, or why on none."""

    name: str
    summary: str
    devices: tuple[str, ...]
    kernel: str | None
    reason: str | None


@dataclass(frozen=True)
class Health(Result):
    """What `heedful doctor` prints."""

    heedful: str
    python: str
    system: str
    packages: tuple[Package, ...]
    devices: tuple[Device, ...]
    implementations: tuple[Way, ...]


def examine() -> Health:
    """Looks at packages and devices, and runs every implementation of `attend` once on a tiny input.

    >>> {way.name: way.devices for way in examine().implementations}["reference"][0]
    'cpu'
    """
    return Health(
        heedful=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages=tuple(_packages()),
        devices=_devices(),
        implementations=tuple(_implementations()),
    )


def show(health: Health) -> None:
    """Prints the report to the terminal, or as plain text to a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    yes, no = Text("yes", "green"), Text("no", "yellow")
    console.print(f"[bold]heedful {health.heedful}[/bold], Python {health.python}, {health.system}")

    def table(title: str, *columns: str) -> Table:
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
        )
        for column in columns:
            table.add_column(column, style="bold" if column == columns[0] else None, header_style="dim")
        return table

    packages = table("Packages", "name", "wanted", "extra", "version, or how to get it")
    for package in health.packages:
        here = Text(package.version, "green") if package.version else Text(package.remedy or "", "yellow")
        packages.add_row(package.name, package.wanted, package.extra, here)
    devices = table("Devices", "name", "here", "detail")
    for device in health.devices:
        devices.add_row(device.name, yes if device.available else no, device.detail)
    ways = table("Implementations of attention", "name", "runs on", "what it does")
    for way in health.implementations:
        ran = Text(", ".join(way.devices), "green") if way.devices else no
        ways.add_row(way.name, ran, Text(f"{way.summary}\nnot here: {way.reason}" if way.reason else way.summary))
    for part in (packages, devices, ways):
        console.print()
        console.print(part)


def _packages() -> Iterator[Package]:
    try:
        requirements = metadata.requires("heedful") or []
    except metadata.PackageNotFoundError:
        requirements = []
    packages = []
    for requirement in requirements:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        parts = re.match(r"([\w.-]+)\s*([^;\s]*)", requirement)
        if parts and (extra is None or extra[1] not in NOT_SHOWN):
            packages.append(Package(parts[1], parts[2], _version(parts[1]), extra and extra[1]))
    yield from sorted(packages, key=lambda package: (package.extra or "", package.name))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[Device, ...]:
    import torch

    threads = torch.get_num_threads()
    cpu = Device("cpu", True, f"{quantity(threads, 'thread')}, {torch.backends.cpu.get_cpu_capability()}")
    if torch.cuda.is_available():
        return (
            cpu,
            *(
                Device(
                    f"cuda:{at}", True, f"{card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
                )
                for at, card in enumerate(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
            ),
            _triton(),
        )
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} was built without CUDA"
    else:
        why = f"torch was built for CUDA {torch.version.cuda}, but finds no working GPU and driver"
    return cpu, Device("cuda", False, why), _triton()


def _triton() -> Device:
    """What compiles the fused kernels for a GPU."""
    if _version("triton") is None:
        return Device("triton", False, "compiles fused kernels for a GPU; comes with torch for CUDA")
    from heedful.ops.fused import serving

    return Device("triton", True, serving.standing())


def _implementations() -> Iterator[Way]:
    """Every implementation, each with the first of a few kernels that it takes."""
    import torch

    from heedful import FeatureMap, Gaussian, Sigmoid, Softmax, attend
    from heedful.ops import IMPLEMENTATIONS

    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    # Sizes that a fused kernel takes as well.
    example = torch.linspace(-1, 1, 2 * 16 * 16).reshape(1, 2, 16, 16)
    kernels = (Softmax(), FeatureMap("elu"), Gaussian(1.0), Sigmoid())
    for way in IMPLEMENTATIONS.values():
        ran: dict[str, str] = {}
        reasons: Counter[str] = Counter()
        for device in devices:
            x = example.to(device)
            for kernel in kernels:
                (verdict,) = (one for one in attend.plan(x, x, x, kernel=kernel).considered if one.name == way.name)
                if verdict.refusal is not None:
                    reasons[verdict.refusal] += 1
                    continue
                # A broken compiler or driver shows itself by any exception, and the report must go on.
                try:
                    output = attend(x, x, x, kernel=kernel, impl=way.name)
                    right = attend(x, x, x, kernel=kernel, impl="reference")
                    torch.testing.assert_close(output, right, atol=1e-3, rtol=1e-3)
                    ran[device] = type(kernel).__name__
                except Exception as error:
                    reasons[f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"] += len(kernels)
                break
        reason = None if ran else reasons.most_common(1)[0][0]
        yield Way(way.name, way.summary, tuple(ran), next(iter(ran.values()), None), reason)
