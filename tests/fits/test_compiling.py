"""How fits are compiled, whatever XLA there is."""

import numpy as np
import pytest

from akjax.fits import compiling
from akjax.fits.compiling import quick_jit, quick_options


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_OLDER", {"xla_no_such_option": False})
    quick_options.cache_clear()
    try:
        assert quick_options() == {}
        assert float(quick_jit(lambda x: 2.0 * x)(np.float32(3.0))) == 6.0
    finally:
        quick_options.cache_clear()
