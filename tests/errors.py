"""What a user can correct is rejected with fields: tests assert these, not sentences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from assay.errors import AssayError


@contextmanager
def rejected(key: str | None = None, path: Path | str | None = None) -> Iterator[None]:
    """The block raises an error about this setting or file."""
    with pytest.raises(AssayError) as caught:
        yield
    assert caught.value.key == key
    assert path is None or caught.value.path == str(path)


@contextmanager
def rejects(path: object = None, key: str | None = None) -> Iterator[None]:
    """The block raises an error about this key, and a path that ends like this; it says what to do."""
    with pytest.raises(AssayError) as caught:
        yield
    error = caught.value
    assert (error.path or "").endswith(str(path or "")) and error.key == key, error
    assert error.cure and error.cure.isprintable() and error.what.isprintable(), error


def fault(call: Callable[[], Any]) -> AssayError:
    """What `call` raises."""
    with pytest.raises(AssayError) as caught:
        call()
    return caught.value
