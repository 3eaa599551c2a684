"""
The compiled part of deep_moe. Use the package's public classes instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def register_errors(classes: dict[str, type[Exception]], /) -> None:
    """Hands over the exception classes, by name."""

def register_torch(tensor_type: type[torch.Tensor], from_dlpack: object, current_stream: Callable[[int], int] | None, dtypes: dict[str, torch.dtype], exchange: object | None, /) -> None:
    """
    Hands over torch's objects: the tensor class, what turns a DLPack capsule into a tensor, what tells a CUDA
    device's current stream, dtypes by name, and the capsule of DLPack's table of functions, or None.
    """

def dtype_names() -> list[str]:
    """The names of all element types that can be moved."""

class Config:
    """
    Tuning numbers of the high-throughput mode. All are checked; num_sms alone is used, on GPUs.

    Args:
        num_sms: multiprocessors that a call may use.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: tokens of a chunk within a node.
        num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: the same between nodes.

    Raises:
        ValueError: unless each send number is below its recv number and rdma send is at most half
            of rdma recv (which is first rounded up to a multiple of rdma send).
    """

    def __init__(self, num_sms: int = 20, num_max_nvl_chunked_send_tokens: int = 6, num_max_nvl_chunked_recv_tokens: int = 256, num_max_rdma_chunked_send_tokens: int = 6, num_max_rdma_chunked_recv_tokens: int = 256) -> None: ...

    @property
    def num_sms(self) -> int:
        """As given."""

    @property
    def num_max_nvl_chunked_send_tokens(self) -> int:
        """As given."""

    @property
    def num_max_nvl_chunked_recv_tokens(self) -> int:
        """As given."""

    @property
    def num_max_rdma_chunked_send_tokens(self) -> int:
        """As given."""

    @property
    def num_max_rdma_chunked_recv_tokens(self) -> int:
        """Rounded up."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """
        Bytes for num_nvl_bytes with which rows of hidden_bytes bytes need no growth of the heap at usual sizes,
        among num_ranks ranks.
        """

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """
        Bytes for num_rdma_bytes in the high-throughput mode between nodes, for rows of hidden_bytes bytes among
        num_ranks ranks; 0 on one node.
        """

    def __repr__(self) -> str: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> tuple[int, int, int, int, int]: ...

    def __setstate__(self, state: tuple[int, int, int, int, int], /) -> None: ...

def dispatch_config(num_ranks: int, num_sms: int) -> Config:
    """The tuned numbers for dispatch."""

def combine_config(num_ranks: int, num_sms: int) -> Config:
    """The tuned numbers for combine."""

def low_latency_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of low-latency staging."""

def workspace_bytes(num_ranks: int, cuda: bool) -> int:
    """Bytes of the control words of one rank."""

def received_bytes(num_rows: int, row_bytes: int, scale_bytes: int, topk: int) -> int:
    """Bytes of heap for what a dispatch with int64 ids and weights receives."""

def build_info() -> dict[str, Any]:
    """
    version: str; variant: "cpu", "cu12" or "cu13"; cuda_compiled: bool; cuda_archs: list[str], such as
    "90a"; sm90_archs: list[str], those whose code uses what came with sm_90; cuda_transport: bool, whether
    rows can be moved between GPUs; simd: str, chosen at run time; compiler: str; abi3: bool.
    """

def network_status() -> dict[str, str]:
    """
    Loads the plug-in for exchanges between nodes, once: path, problem (empty where it serves), built_against,
    library (versions of NVSHMEM).
    """

def own_addresses() -> list[str]:
    """
    Where ranks of other machines reach this one's: of the interfaces that DEEP_MOE_SOCKET_IFNAME names, else of
    all that are up, those first that are likely to serve.
    """

class Buffer:
    """One rank's end of the exchange; deep_moe.Buffer wraps it."""

    def __init__(self, rank: int, size: int, all_gather: Callable[[bytes], Sequence[bytes]], num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool, enable_shrink: bool, timeout_seconds: float, device: int, use_fabric: bool) -> None:
        """
        Collective. all_gather is called a few times and only in here. device: a CUDA ordinal, or -1 for the CPU.
        """

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def get_num_rdma_ranks(self) -> int:
        """Nodes of the group."""

    def get_rdma_rank(self) -> int:
        """This rank's node."""

    @property
    def comm_stream(self) -> int:
        """The cudaStream_t of the Buffer's calls; 0 on the CPU."""

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """
        The memory of the tensor is reused only behind the work of this cudaStream_t too.
        """

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the heap."""

    def local_buffer(self, offset: int, num_bytes: int, use_rdma_buffer: bool) -> torch.Tensor:
        """[num_bytes] uint8 of scratch memory that no call uses."""

    @property
    def memory_kind(self) -> str:
        """How ranks share memory: memfd, fd, fabric or ipc."""

    def memory_stats(self) -> dict[str, int]:
        """Bytes and blocks of the heap."""

    def refuse(self, call: str, reason: str) -> None:
        """Tells the peers that this rank refuses the arguments of its next call."""

    def check(self) -> None:
        """Raises what has failed the Buffer, if anything."""

    def reset(self) -> None:
        """Collective, after a failure."""

    def destroy(self) -> None:
        """Local and idempotent."""

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, previous_event: int, async_finish: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """
        (num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank); local. The second is
        None on one node. previous_event: a cudaEvent_t, or 0.
        """

    def dispatch(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], handle: tuple[torch.Tensor, ...] | None, num_tokens_per_rank: torch.Tensor | None, num_tokens_per_rdma_rank: torch.Tensor | None, is_token_in_rank: torch.Tensor | None, num_tokens_per_expert: torch.Tensor | None, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, expert_alignment: int, num_worst_tokens: int, num_experts: int | None, expert_major: bool, num_sms: int, previous_event: int, async_finish: bool) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor | None, torch.Tensor | None, list[int] | None, tuple[torch.Tensor, ...] | None]:
        """
        (recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert, handle); with a handle given, all
        but recv_x are None.
        """

    def combine(self, x: torch.Tensor, handle: tuple[torch.Tensor, ...], topk_weights: torch.Tensor | None, bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None, out: torch.Tensor | None, row_weights: torch.Tensor | None, num_sms: int, previous_event: int, async_finish: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(combined_x, combined_topk_weights)"""

    def low_latency_dispatch(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], topk_idx: torch.Tensor, max_tokens: int, num_experts: int, recv_stats: torch.Tensor | None, wait_stats: torch.Tensor | None, use_fp8: bool, round_scale: bool, use_ue8m0: bool, return_recv_hook: bool, topk_weights: torch.Tensor | None, async_finish: bool) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, tuple[torch.Tensor, ...], Hook | None]:
        """(recv_x, recv_count, handle, hook)"""

    def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: tuple[torch.Tensor, ...], use_logfmt: bool, return_recv_hook: bool, out: torch.Tensor | None, wait_stats: torch.Tensor | None, async_finish: bool) -> tuple[torch.Tensor, Hook | None]:
        """(combined_x, hook)"""

    def low_latency_combine_input(self, handle: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """An uninitialised tensor of the shape and dtype that combine takes."""

    def clean_low_latency_buffer(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        """Checks the numbers; nothing needs cleaning."""

    def update_mask(self, rank: int, masked: bool) -> None:
        """Masks or unmasks a rank."""

    def query_mask(self, mask_status: torch.Tensor) -> None:
        """Fills [R] int32: 1 = masked."""

    def clean_mask(self) -> None:
        """Unmasks all ranks."""

class Hook:
    """
    The receive half of a low-latency call. Call it once; tensors are complete afterwards.
    """

    def __call__(self) -> None: ...

class BenchRank:
    """
    One rank of a timing, driven from C++: chains of calls on a Buffer of a GPU, and plain copies of
    the same rows. For `deep-moe bench`; cpp/python/bench_rank.hpp says what each step is.
    """

    def __init__(self, buffer: Buffer) -> None: ...

    def set_inputs(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, ordinary: torch.Tensor, landing: Sequence[int]) -> None:
        """
        Collective: one dispatch. Keeps the tensors; landing: addresses of R places for plain copies, or none.
        """

    def prepare(self, steps: Sequence[str], num_sms: int, graph_repeats: int, copy_warps: int, copy_stages: int, copy_tickets: bool) -> None:
        """
        Gets a chain ready. Local; no kernel that waits for a peer may be running on any rank.
        """

    def run(self, count: int) -> tuple[float, float, float]:
        """
        Runs the chain once, then `count` times; microseconds a chain by events on the current stream, until the
        last call has returned, and until the stream is idle.
        """

    def can_copy(self) -> bool:
        """
        Whether this GPU has the copy engine that plain copies use; known after set_inputs.
        """

    def received(self) -> torch.Tensor | None:
        """Rows of the last dispatch."""

    def combined(self) -> torch.Tensor | None:
        """Rows of the last combine."""

def bench_hold(device: int, num_sms: int, num_ranks: int, nanoseconds: int, stream: int) -> None:
    """
    Holds multiprocessors with the blocks, threads and shared memory of a dispatch, without using them.
    """
