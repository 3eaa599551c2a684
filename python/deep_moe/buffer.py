"""The Buffer: expert-parallel dispatch and combine for one rank of a group."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch

from . import _C, tuning
from ._base import Payload
from ._low_latency import LowLatencyCalls
from .config import (
    NUM_SMS,
    Config,
    check_config,
    check_streams,
    combine_config,
    dispatch_config,
    low_latency_size_hint,
    whole_number,
)
from .events import EventHandle, EventOverlap
from .handles import AnyDispatchHandle, handle_type

__all__ = ["Buffer"]

P = TypeVar(
    "P", torch.Tensor, tuple[torch.Tensor, torch.Tensor]
)  # x of dispatch: one tensor, or data and scales


class Buffer(LowLatencyCalls):
    """Dispatch and combine of tokens among the ranks of a group.

    Every call marked *collective* is made by all ranks, on their Buffers, in the same order. A rank that
    refuses its arguments raises ValueError or TypeError and makes its peers raise PeerRefusedError; the next
    call works. A time-out or a lost peer fails the Buffer: each call raises the same error until
    :meth:`reset` or :meth:`destroy`.

    A Buffer may be used from several threads; calls are serialised. Two Buffers are independent. In a process
    forked after it was made, a Buffer raises ForkedProcessError.

    On a GPU, a call runs on the current stream, with its priority. With ``async_finish`` or
    ``previous_event``, or captured into a graph, it runs on a stream of the Buffer's own
    (:meth:`get_comm_stream`): behind the work that the current stream has at the time of the call, or behind
    ``previous_event``; and the current stream waits for it, unless ``async_finish`` leaves that to the
    returned event. Ranks that are threads of one process
    therefore need a current stream each (``with torch.cuda.stream(torch.cuda.Stream()):``): on one that they
    share, each would wait for the other's call.

    Args:
        group: a torch ProcessGroup of any backend, used in the constructor alone; or None with ``comm``.
        num_nvl_bytes: bytes that the heap has at the start; it grows to what calls need. Whole-valued floats
            are taken.
        num_rdma_bytes: bytes of low-latency staging at the start; between nodes also what the rings of the
            high-throughput mode may take (:meth:`deep_moe.Config.get_rdma_buffer_size_hint`; the largest
            value on any rank counts, and 0 leaves room for rows of 7168 bfloat16 elements).
        low_latency_mode: prepare for low-latency calls, which work either way; between nodes over the network
            only then with the memory that num_rdma_bytes says, which does not grow.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode: kept for compatibility; queue pairs are set by
            NVSHMEM's own variables.
        allow_mnnvl, use_fabric: GPUs share memory by fabric handles where the machine has a fabric.
        explicitly_destroy: kept for compatibility; :meth:`destroy` may always be called and never must.
        enable_shrink: low-latency calls mask a rank that does not answer in time, instead of failing.
        comm: an mpi4py communicator, or one of :func:`deep_moe.thread_comms`.
        device: where tensors are: "cpu", or a CUDA device by name or index, without an index the current one.
            None takes the current CUDA device where there is one and this build serves it, else the CPU. All
            ranks are on CUDA devices or none.
        timeout: seconds after which a wait for a peer raises DeepMoeTimeoutError.

    Attributes:
        group, rank, group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode, device: as given; with
            ``comm`` alone, group is that.
        num_nodes: how many nodes the ranks are on.
        num_sms: of the class; what :meth:`set_num_sms` has set.
        runtime: the compiled object behind this one.
        key: a name of this Buffer in its process, by which :mod:`deep_moe.nn` finds it.

    Raises:
        ValueError, TypeError, UnavailableError: wrong arguments; on the peers PeerRefusedError.
    """

    num_sms: int = NUM_SMS
    _is_num_sms_set = False

    # ---- settings and hints ----
    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether this build has code for GPUs of compute capability 9.0 that uses what came with them."""
        return any(arch.startswith("90") for arch in _C.build_info()["sm90_archs"])

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets how many SMs the high-throughput calls of all Buffers may use.

        Calls take at most what runs at the same time as the other ranks that are threads on the same GPU,
        less two SMs. Nothing on the CPU.

        Args:
            new_num_sms: at least 1.

        Raises:
            ValueError, TypeError: it is less, or no whole number.
        """
        Buffer.num_sms = whole_number(new_num_sms, "new_num_sms", lowest=1)
        Buffer._is_num_sms_set = True

    @staticmethod
    def capture() -> EventOverlap:
        """An event of the current stream of the current device at this moment, for ``previous_event``."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The tuned Config for :meth:`dispatch` among any number of ranks.

        Its SMs are those of :meth:`set_num_sms`, else of a tuning file (``deep-moe tune``) that fits this
        hardware and ``num_ranks``, else built in. All ranks have to see the same file.

        Args:
            num_ranks: any number from 1.
        """
        return dispatch_config(num_ranks, Buffer._sms_of("dispatch", num_ranks))

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The tuned Config for :meth:`combine` among any number of ranks; as :meth:`get_dispatch_config`.

        Args:
            num_ranks: any number from 1.
        """
        return combine_config(num_ranks, Buffer._sms_of("combine", num_ranks))

    @staticmethod
    def _sms_of(call: str, num_ranks: int) -> int:
        if Buffer._is_num_sms_set or Buffer.num_sms != NUM_SMS:
            return Buffer.num_sms
        return tuning.num_sms(call, num_ranks) or NUM_SMS

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes for ``num_rdma_bytes`` with which low-latency calls of these sizes need no growth.

        Args:
            num_max_dispatch_tokens_per_rank: M.
            hidden: H.
            num_ranks: R.
            num_experts: E.

        Raises:
            ValueError, TypeError: a size is below 1, or no whole number.
        """
        return low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    # ---- the high-throughput mode ----
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts where this rank's tokens go. Local.

        Rank r owns a contiguous block of the E experts; the first E % R ranks own one more.

        Args:
            topk_idx: ``[T, K]`` int64 or int32 on the Buffer's device, global expert ids, -1 for none;
                contiguous.
            num_experts: E.
            previous_event: what the call waits for, instead of the current stream's work so far.
            async_finish: the current stream does not wait for the results; the returned event says when they
                are there.
            allocate_on_comm_stream: results belong to the communication stream; needs both of the above.

        Returns:
            ``(num_tokens_per_rank [R] int32, num_tokens_per_rdma_rank [D] int32, num_tokens_per_expert [E]
            int32, is_token_in_rank [T, R] bool, event)``. The second counts the tokens that go to each of
            the D nodes and is None where there is one. Ordinary tensors.

        Raises:
            ValueError: a wrong shape; on the CPU also an id outside [-1, E). TypeError: a wrong dtype.
        """
        behind = check_streams(previous_event, async_finish, allocate_on_comm_stream)
        per_rank, per_node, per_expert, in_rank = self.runtime.get_dispatch_layout(
            topk_idx, num_experts, behind, async_finish
        )
        return per_rank, per_node, per_expert, in_rank, self._event(async_finish, topk_idx)

    @overload
    def dispatch(
        self,
        x: P,
        handle: None = ...,
        num_tokens_per_rank: torch.Tensor | None = ...,
        num_tokens_per_rdma_rank: torch.Tensor | None = ...,
        is_token_in_rank: torch.Tensor | None = ...,
        num_tokens_per_expert: torch.Tensor | None = ...,
        topk_idx: torch.Tensor | None = ...,
        topk_weights: torch.Tensor | None = ...,
        expert_alignment: int = ...,
        num_worst_tokens: int = ...,
        config: Config | None = ...,
        previous_event: EventOverlap | None = ...,
        async_finish: bool = ...,
        allocate_on_comm_stream: bool = ...,
        *,
        num_experts: int | None = ...,
        expert_major: bool = ...,
    ) -> tuple[
        P,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int],
        AnyDispatchHandle,
        EventOverlap,
    ]: ...

    @overload
    def dispatch(
        self,
        x: P,
        handle: tuple[torch.Tensor, ...],
        num_tokens_per_rank: torch.Tensor | None = ...,
        num_tokens_per_rdma_rank: torch.Tensor | None = ...,
        is_token_in_rank: torch.Tensor | None = ...,
        num_tokens_per_expert: torch.Tensor | None = ...,
        topk_idx: torch.Tensor | None = ...,
        topk_weights: torch.Tensor | None = ...,
        expert_alignment: int = ...,
        num_worst_tokens: int = ...,
        config: Config | None = ...,
        previous_event: EventOverlap | None = ...,
        async_finish: bool = ...,
        allocate_on_comm_stream: bool = ...,
        *,
        num_experts: int | None = ...,
        expert_major: bool = ...,
    ) -> tuple[P, None, None, None, None, EventOverlap]: ...

    def dispatch(
        self,
        x: Payload,
        handle: tuple[torch.Tensor, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        num_experts: int | None = None,
        expert_major: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, Any, Any, EventOverlap]:
        """Sends each token once to every rank that owns one of its experts. Collective.

        Say where rows go in one of these ways:

        - ``topk_idx`` and ``num_experts=``: layout and dispatch in one step, the fast way;
        - ``topk_idx`` and what :meth:`get_dispatch_layout` returned, E being the length of the counts;
        - ``is_token_in_rank`` and ``num_tokens_per_expert`` without ids;
        - ``handle`` of an earlier dispatch: the same rows go the same ways again, without ids and weights.

        All tensors are on the Buffer's device. x and the others may be changed once the event is over.

        Args:
            x: ``[T, H]`` of any element type, rows of a multiple of 16 bytes, contiguous within a row; or
                ``(data [T, H], scales [T, S] or [T])``, scales with any strides. Bytes travel as they are.
            handle: what an earlier dispatch returned; any tuple of its tensors.
            num_tokens_per_rank: ``[R]`` int32, of get_dispatch_layout.
            num_tokens_per_rdma_rank: ``[D]`` int32, of get_dispatch_layout; may be left out.
            is_token_in_rank: ``[T, R]`` bool, of get_dispatch_layout.
            num_tokens_per_expert: ``[E]`` int32, of get_dispatch_layout.
            topk_idx: ``[T, K]`` int64 or int32, global expert ids, -1 for none; contiguous. Others raise;
                on GPUs with ``DEEP_MOE_CHECK=1`` alone.
            topk_weights: ``[T, K]`` float32.
            expert_alignment: each entry of the returned count list is rounded up to a multiple of it.
            num_worst_tokens: if not 0, the number of rows of all results, whatever arrives: ids and sources
                are -1, weights 0 and rows anything past those that arrived. Too small a number raises
                ValueError on every rank.
            config: tuning numbers, as of :meth:`get_dispatch_config`; None: the SMs of :meth:`set_num_sms`.
            previous_event, async_finish, allocate_on_comm_stream: as in :meth:`get_dispatch_layout`.
            num_experts: E.
            expert_major: rows grouped by local expert, for grouped GEMMs, see below. Needs ``topk_idx``. A
                handle has its order with it. Each rank may choose for itself.

        Returns:
            ``(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event)``

            - recv_x: ``[N, H]``, ordered by source rank, then source token; a pair if x was one, with scales
              ``[N, S]`` that are column-major if the input's were;
            - recv_topk_idx: ``[N, K]`` of topk_idx's dtype, local expert ids, -1 elsewhere;
            - recv_topk_weights: ``[N, K]`` float32, 0 where the id is -1;
            - the list: L ints, entries != -1 for each local expert, aligned; empty with num_worst_tokens;
            - handle: for :meth:`combine` and cached dispatches;
            - event: its ``.event`` is None unless ``async_finish``.

            Expert-major, each entry of ``topk_idx`` that names an expert of this rank has a row, P in all.
            Rows still cross each link once; this rank copies them.

            - recv_x: ``[P, H]``, one group a local expert, its rows ordered as above, then by k. Zero rows
              (with zero scales) fill each group up to a multiple of ``expert_alignment``;
            - recv_topk_idx: ``[P]`` int32, each row's local expert, -1 in the padding;
            - recv_topk_weights: ``[P]`` float32, each row's weight, 0 in the padding;
            - the list: rows of each group, padding included;
            - handle: an :class:`deep_moe.ExpertMajorHandle`; its expert_offsets, expert_counts and
              expert_rows, on the Buffer's device, tell where which row is.

            Expert-major with ``num_worst_tokens``, which then bounds N, P is what so many rows can become:
            ``num_worst_tokens * K + L * (expert_alignment - 1)``, rounded up to the alignment. The list is
            empty; behind the last group, at ``expert_offsets[-1]``, ids are -1, weights 0, and rows hold
            anything.

            Ids and weights that were not given come back as None; with ``handle`` all but recv_x and the
            event are None. Received tensors belong to the caller, live as long as they are referenced and
            survive :meth:`destroy`.

        Raises:
            ValueError, TypeError: wrong arguments; the peers raise PeerRefusedError.
            BufferTooSmallError, CallMismatchError, DeepMoeTimeoutError, PeerLostError, DestroyedError.
        """
        with self._dispatch_checks:
            num_sms = check_config(config, Buffer.num_sms)
            behind = check_streams(previous_event, async_finish, allocate_on_comm_stream)
        recv_x, recv_topk_idx, recv_topk_weights, counts, new_handle = self.runtime.dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            num_experts,
            expert_major,
            num_sms,
            behind,
            async_finish,
        )
        made = None
        if new_handle is not None:
            made = handle_type(self.num_nodes > 1, expert_major)._make(new_handle)
        event = self._event(
            async_finish,
            x,
            handle,
            num_tokens_per_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
        )
        return recv_x, recv_topk_idx, recv_topk_weights, counts, made, event

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        out: torch.Tensor | None = None,
        row_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Brings rows back to the tokens they came from and adds them up, without weights. Collective.

        The sum is fp32: first the biases, then the ranks in ascending order, rounded once to x's dtype.
        Between nodes, node by node: what another node's ranks hold is summed there and rounded to x's dtype
        for the network, in one row a token.

        Args:
            x: ``[N, H]`` bfloat16, float16 or float32, rows as the dispatch gave them. A received tensor
                changed in place, or one of :meth:`empty`, is read in place by the peers. May be changed once
                the event is over.
            handle: of the dispatch; any tuple of its tensors.
            topk_weights: ``[N, K]`` float32, summed over ranks in the same way.
            bias: one or two ``[T, H]`` of x's dtype, added to every token.
            config, previous_event, async_finish, allocate_on_comm_stream: as in :meth:`dispatch`.
            out: ``[T, H]`` of x's dtype, for the result.
            row_weights: ``[P]`` float32, see below.

        With the handle of an expert-major dispatch, x is ``[P, H]`` and ``topk_weights`` ``[P]``. The rows
        of each received row, which are those of one token on this rank, are first summed here, in fp32 and
        in the order of k, and rounded to x's dtype. They are added as they are, unless ``row_weights`` are
        given, by which they are multiplied in fp32: normally what the dispatch returned as
        recv_topk_weights, where the expert has not applied them. Padding is not read.

        Returns:
            ``(combined_x, combined_topk_weights, event)``: ``[T, H]`` of x's dtype (``out`` itself where
            given); ``[T, K]`` float32, or None without weights.

        Raises:
            As :meth:`dispatch`.
        """
        with self._combine_checks:
            num_sms = check_config(config, Buffer.num_sms)
            behind = check_streams(previous_event, async_finish, allocate_on_comm_stream)
        combined_x, combined_weights = self.runtime.combine(
            x, handle, topk_weights, bias, out, row_weights, num_sms, behind, async_finish
        )
        event = self._event(async_finish, x, handle, topk_weights, bias, out, row_weights)
        return combined_x, combined_weights, event

    # Between nodes and within one the calls are the same; these names are for programs that choose.
    internode_dispatch = dispatch
    internode_combine = combine
