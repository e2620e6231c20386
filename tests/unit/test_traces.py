"""The reader of profiler traces, on which tests of overlap over NCCL rest."""

from support.traces import Interval, Trace, union


def event(name, start, stop, cat="kernel", stream=7):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": stop - start, "args": {"stream": stream}}


def test_what_runs_beside_what():
    send = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    trace = Trace.of(
        [
            event("gemm", 0, 10),
            event("attention", 20, 40),
            event(send, 12, 18, stream=20),
            event(send, 30, 60, stream=20),
            event(send, 40, 44),
            event("copy", 13, 16, stream=20),
            event(send, 61, 64, stream=20),
            event(send, 63, 66, stream=22),
            event("ncclDevKernel_AllGather_RING_LL(x)", 50, 55, stream=21),
            event("cudaStreamSynchronize", 26, 27, cat="cuda_runtime"),
            event("cudaLaunchKernel", 1, 2, cat="cuda_runtime"),
            event("forward", 25, 50, cat="user_annotation"),
            event("backward", 60, 90, cat="user_annotation"),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert [kernel.verb for kernel in trace.kernels] == [
        None, "SendRecv", None, None, "SendRecv", "SendRecv", "AllGather", "SendRecv", "SendRecv"
    ]  # fmt: skip
    assert [kernel.name for kernel in trace.compute()] == ["gemm", "attention"]
    assert trace.beside("SendRecv") == 1 / 4 and trace.beside("AllGather") == 0.0 == trace.beside("AllReduce")
    assert trace.alone("SendRecv") == 1 / 4 and trace.alone("AllGather") == 0.0 == trace.alone("AllReduce")
    assert trace.waits_in("forward") == ["cudaStreamSynchronize"] and not trace.waits_in("backward")


def test_intervals_that_overlap_are_joined():
    assert union([Interval(4, 6), Interval(0, 2), Interval(1, 3), Interval(3, 4)]) == [Interval(0, 6)]
