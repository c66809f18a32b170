"""The sizes that graphs are captured for, from configs as vLLM makes them and as a GPU's would be."""

import pytest
from vllm.config import CUDAGraphMode, VllmConfig

from akjax.scheduler.cuda_graphs import captured_sizes
from harness import make_config


def config(mode: CUDAGraphMode | None, sizes: list[int] | None) -> VllmConfig:
    made = make_config()
    made.compilation_config.cudagraph_mode = mode  # pyright: ignore[reportAttributeAccessIssue]
    made.compilation_config.cudagraph_capture_sizes = sizes  # pyright: ignore[reportAttributeAccessIssue]
    return made


def test_an_engine_without_graphs_has_none() -> None:
    assert captured_sizes(make_config()) == ()


@pytest.mark.parametrize("mode", [None, CUDAGraphMode.NONE])
def test_sizes_that_nothing_is_captured_for_do_not_count(mode: CUDAGraphMode | None) -> None:
    assert captured_sizes(config(mode, [1, 2, 4])) == ()


@pytest.mark.parametrize("mode", [mode for mode in CUDAGraphMode if mode])
def test_sizes_of_every_mode_with_graphs(mode: CUDAGraphMode) -> None:
    assert captured_sizes(config(mode, [8, 1, 4, 2, 4])) == (1, 2, 4, 8)


@pytest.mark.parametrize("sizes", [None, []])
def test_graphs_without_sizes_are_none(sizes: list[int] | None) -> None:
    assert captured_sizes(config(CUDAGraphMode.FULL, sizes)) == ()
