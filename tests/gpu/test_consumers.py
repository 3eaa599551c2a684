"""The calls of published programs on GPUs: the CPU's tests, and a program that knows nothing of deep_moe."""

from __future__ import annotations

import pathlib

import pytest

from ..cpu import test_consumers_serving as serving
from ..cpu import test_consumers_training as training
from ..cpu.test_deep_ep_shim import succeeds

pytestmark = pytest.mark.gpus(1)

TESTS = [
    serving.test_vllm_high_throughput,
    serving.test_vllm_low_latency,
    serving.test_sglang,
    serving.test_rtp_llm_and_lightllm_sizes_are_floats,
    training.test_megatron_autograd,
    training.test_megatron_keeps_a_buffer_while_it_is_large_enough,
    training.test_xtuner_saves_the_handle_for_backward,
]


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__.removeprefix("test_"))
def test_consumers(test: object, form: str) -> None:
    assert callable(test)
    test(form)


def test_tensorrt_llm_communicator(process_form: str) -> None:
    serving.test_tensorrt_llm_communicator(process_form)


PROGRAM = """
import torch
import torch.distributed as dist
import deep_ep

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.cuda.set_device(0)
buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 24, 0)
x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
topk_idx = torch.stack([torch.arange(64, device="cuda") % 4, 4 + torch.arange(64, device="cuda") % 4], 1)
layout = buffer.get_dispatch_layout(topk_idx, 8)
rows, ids, _, counts, handle, event = buffer.dispatch(
    x,
    topk_idx=topk_idx,
    topk_weights=torch.ones(64, 2, device="cuda"),
    num_tokens_per_rank=layout[0],
    num_tokens_per_rdma_rank=layout[1],
    is_token_in_rank=layout[3],
    num_tokens_per_expert=layout[2],
    async_finish=True,
)
event.current_stream_wait()
combined, _, event = buffer.combine(rows, handle, async_finish=True)
event.current_stream_wait()
print(rows.is_cuda, torch.equal(rows, x), torch.equal(combined, x), counts)
dist.destroy_process_group()
"""


def test_a_program_written_for_deep_ep(tmp_path: pathlib.Path) -> None:
    """NCCL's group, CUDA tensors, asynchronous calls; the module stands in for DeepEP from outside."""
    (tmp_path / "program.py").write_text(PROGRAM)
    printed = succeeds("-m", "deep_moe.deep_ep_shim", str(tmp_path / "program.py"))
    assert printed.splitlines()[-1] == f"True True True {[16] * 8}"
