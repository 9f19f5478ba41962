"""What a user can correct is rejected with fields: tests assert these, not sentences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from assay.errors import AssayError


@contextmanager
def rejected(key: str | None = None, path: object = None) -> Iterator[None]:
    """The block raises an error about this setting, or that says what to do; its path ends like this one."""
    with pytest.raises(AssayError) as caught:
        yield
    error = caught.value
    assert error.key == key and (error.path or "").endswith(str(path or "")), error
    assert (error.key or error.cure) and f"{error.what} {error.cure}".isprintable(), error


def fault(call: Callable[[], Any]) -> AssayError:
    """What `call` raises."""
    with pytest.raises(AssayError) as caught:
        call()
    return caught.value
