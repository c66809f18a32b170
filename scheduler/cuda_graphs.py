"""What vLLM's configuration says of its CUDA graphs."""

from vllm.config import VllmConfig


def captured_sizes(vllm_config: VllmConfig) -> tuple[int, ...]:
    """The numbers of tokens that CUDA graphs are captured for, ascending; () where no step runs in one.

    A step of fewer tokens runs in the next larger graph, padded; one of more than the largest runs without. The V2
    model runner captures uniform decode batches at these sizes rounded up to a multiple of 1 + k, for each k of the
    schedule. A worker in a process of its own may yet give graphs up, if its attention cannot do with them.
    """
    compilation = vllm_config.compilation_config
    # Eager mode and platforms without graphs set the mode to none, which leaves the sizes of some users in place.
    if not compilation.cudagraph_mode:
        return ()
    return tuple(sorted({*(compilation.cudagraph_capture_sizes or ())}))
