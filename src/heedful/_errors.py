"""Errors that say what was given, what was expected, and what to do next."""


class HeedfulError(Exception):
    """Base of every error raised on purpose by heedful."""


class InvalidArgument(HeedfulError, ValueError):
    """An argument has the wrong shape, type, range or kind."""


class Unsupported(HeedfulError, RuntimeError):
    """A named implementation cannot serve this request; the message says why."""


class CorruptModel(HeedfulError, OSError):
    """A saved folder is missing something, truncated, or was altered."""


class MissingExtra(HeedfulError, ImportError):
    """An optional dependency is absent; the message names the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; it comes with the extra '{extra}': pip install 'heedful[{extra}]'"
        )
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.package, self.extra)
