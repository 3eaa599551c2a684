"""The low-latency calls of a Buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ._base import BufferBase, Payload
from .config import check_low_latency
from .events import EventOverlap
from .handles import DeviceLowLatencyHandle, LowLatencyHandle

__all__ = ["LowLatencyCalls"]


class LowLatencyCalls(BufferBase):
    """Small batches, fixed shapes, optional hooks that defer the receive half."""

    def low_latency_dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[
        Payload,
        torch.Tensor,
        LowLatencyHandle | DeviceLowLatencyHandle,
        EventOverlap,
        Callable[[], None] | None,
    ]:
        """Sends each token to the experts it has chosen, packed by local expert. Collective.

        R ranks, T tokens of this rank, H hidden, E experts, K top-k, L local experts, M the cap on T. All
        tensors are on the Buffer's device. On a GPU the call and its hook run on the stream that is current
        where they are called, and return at once; with ``async_finish`` the call runs on the comm stream.
        What goes wrong in its kernels is raised by a later call, which is made all the same, or by
        :meth:`check`.

        Args:
            x: ``[T, H]`` bfloat16, float16 or float32; or ``(data [T, H], scales [T, S])`` of any element
                types, which travel as they are and need ``use_fp8=False``.
            topk_idx: ``[T, K]`` int64 or int32, global expert ids, -1 for none; contiguous. Others raise;
                on GPUs with ``DEEP_MOE_CHECK=1`` alone.
            num_max_dispatch_tokens_per_rank: M, the same on all ranks; T <= M.
            num_experts: E.
            cumulative_local_expert_recv_stats: ``[L]`` int32; the received rows are added to it.
            dispatch_wait_recv_cost_stats: ``[R]`` int64; the nanoseconds waited for each rank are added to
                it.
            use_fp8: cast to float8_e4m3fn with one scale per 128 elements; H % 128 == 0.
            round_scale: scales are powers of two.
            use_ue8m0: scales are packed exponents, four in an int32; implies ``round_scale``; H % 512 == 0.
            async_finish: return an event. Excludes ``return_recv_hook``.
            return_recv_hook: only send; the returned hook receives. At most three calls may wait for their
                hooks.
            topk_weights: ``[T, K]`` float32; with them the combine sums before it sends, also with a hook.

        Returns:
            ``(recv_x, recv_count, handle, event, hook)``

            - recv_x: ``[L, R*M, H]`` of x's dtype; with fp8 a pair of float8_e4m3fn ``[L, R*M, H]`` and
              scales ``[L, R*M, H/128]`` float32 (``[L, R*M, H/512]`` int32 with ue8m0), column-major in the
              last two dims. Rows of an expert are ordered by source rank, then source token; rows past the
              count are unspecified;
            - recv_count: ``[L]`` int32, the rows of each local expert;
            - handle: for :meth:`low_latency_combine`;
            - event: its ``.event`` is None unless ``async_finish``;
            - hook: None, or what is to be called exactly once.

            Everything is complete after the call, or after its hook; x and topk_idx may be changed before the
            hook. Results are ordinary tensors: they live as long as they are referenced.

        Raises:
            ValueError, TypeError: wrong arguments (peers raise PeerRefusedError); too many calls in flight
                raise Error.
            BufferTooSmallError, CallMismatchError, DeepMoeTimeoutError, PeerLostError, DestroyedError.
        """
        with self._low_latency_dispatch_checks:
            check_low_latency(async_finish, return_recv_hook)
        recv_x, recv_count, handle, hook = self.runtime.low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            use_fp8,
            round_scale,
            use_ue8m0,
            return_recv_hook,
            topk_weights,
            async_finish,
        )
        event = self._event(
            async_finish,
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
        )
        made = LowLatencyHandle if self._comm_stream is None else DeviceLowLatencyHandle
        return recv_x, recv_count, made._make(handle), event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[torch.Tensor, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Brings the experts' rows back and sums them with the tokens' weights. Collective.

        Args:
            x: ``[L, R*M, H]`` bfloat16, float16 or float32, laid out as the dispatch's recv_x.
            topk_idx: ``[T, K]``, as given to the dispatch.
            topk_weights: ``[T, K]`` float32.
            handle: of the dispatch; any tuple of its tensors.
            use_logfmt: send 10-bit logarithmic codes; H % 128 == 0. Excludes ``zero_copy``.
            zero_copy: x is what :meth:`get_next_low_latency_combine_buffer` returned.
            async_finish: return an event. Excludes ``return_recv_hook``.
            return_recv_hook: only send; the returned hook receives and sums.
            out: ``[T, H]`` of x's dtype, for the result.
            combine_wait_recv_cost_stats: ``[R]`` int64; the nanoseconds waited for each rank are added to it.

        Returns:
            ``(combined_x, event, hook)``: combined_x ``[T, H]`` of x's dtype (``out`` itself where given),
            complete after the call or its hook; what a masked rank owed is left out of the sum. x may be
            changed at once, topk_weights after the hook.

        Raises:
            ValueError: wrong arguments, ``use_logfmt`` together with ``zero_copy`` among them.
            As :meth:`low_latency_dispatch`.
        """
        with self._low_latency_combine_checks:
            check_low_latency(async_finish, return_recv_hook)
            if use_logfmt and zero_copy:
                raise ValueError(
                    "use_logfmt=True together with zero_copy=True: encoded rows are written by the library; "
                    "pass one of the two"
                )
        combined_x, hook = self.runtime.low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            use_logfmt,
            return_recv_hook,
            out,
            combine_wait_recv_cost_stats,
            async_finish,
        )
        event = self._event(async_finish, x, topk_idx, topk_weights, out, combine_wait_recv_cost_stats)
        return combined_x, event, hook

    def get_next_low_latency_combine_buffer(self, handle: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """A tensor for the experts' outputs, to be passed to :meth:`low_latency_combine` with
        ``zero_copy=True``. Local.

        Returns:
            ``[L, R*M, H]``, row-major, uninitialised, of the dtype given to the dispatch (bfloat16 if that
            cannot be summed). An ordinary tensor: it lives as long as it is referenced.

        Raises:
            ValueError, TypeError: ``handle`` is not of :meth:`low_latency_dispatch`.
        """
        return self.runtime.low_latency_combine_input(handle)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Accepted for programs that switch between the modes; the modes share no memory, so nothing needs
        cleaning.

        Args:
            num_max_dispatch_tokens_per_rank: M.
            hidden: H.
            num_experts: E.

        Raises:
            ValueError, TypeError: the numbers cannot be those of a low-latency call.
        """
        self.runtime.clean_low_latency_buffer(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks ``rank_to_mask`` (``mask=True``), so that it is neither sent to nor waited for; or unmasks.

        Masking is local; on a GPU it holds from here on in the order of the current stream. Unmasking is
        collective over all ranks, the masked ones included: all of them call it (or
        :meth:`low_latency_clean_mask_buffer`), it waits for all of them, and afterwards nobody is masked; on
        a GPU it is a :meth:`reset`, which calls in flight do not survive. Needs ``enable_shrink=True``.

        Raises:
            ValueError: no such other rank, or the Buffer was made without ``enable_shrink``.
        """
        self.runtime.update_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills ``mask_status``, ``[R]`` int32, contiguous, on the Buffer's device: 1 = masked. Local.

        Raises:
            ValueError, TypeError: another shape or dtype, or the Buffer was made without ``enable_shrink``.
        """
        self.runtime.query_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all ranks. Collective: every rank calls it, the masked ones included.

        Raises:
            DeepMoeTimeoutError, PeerLostError: a rank does not take part.
            ValueError: the Buffer was made without ``enable_shrink``.
        """
        self.runtime.clean_mask()
