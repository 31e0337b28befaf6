"""Times on a GPU: medians of CUDA events over runs that find nothing of theirs in the L2 cache."""

import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable

import torch

REPEATS = 21
LONG_US, FEW_REPEATS = 5_000, 5  # runs that take longer are repeated less


class GpuTimer:
    """Before each run a buffer of many times the L2 cache is read; writing it would leave lines to be written back.

    While that goes on the host enqueues the run, so launches cost what the GPU takes for them.
    """

    def __init__(self) -> None:
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self._other = torch.zeros(max(16 * cache, 1 << 30) // 4, device="cuda")

    def __call__(self, run: Callable[[], object]) -> float:
        """Median microseconds of one run."""
        times = [self._once(run), self._once(run)]
        times = [self._once(run) for _ in range(FEW_REPEATS if times[1] > LONG_US else REPEATS)]
        return statistics.median(times)

    def _once(self, run: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._other.sum()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def kernels(self, run: Callable[[], object], names: tuple[str, ...]) -> dict[str, float]:
        """Median microseconds of each kernel whose name contains one of `names`, by CUPTI; without the gaps between."""
        run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for _ in range(REPEATS):
                self._other.sum()
                run()
            torch.cuda.synchronize()
        times = defaultdict(list)
        for event in profile.events():
            for name in names:
                if name in event.name and event.device_type == torch.autograd.DeviceType.CUDA:
                    times[name].append(event.time_range.elapsed_us())
        return {name: statistics.median(values) for name, values in times.items()}

    def read_gb_s(self) -> float:
        """What a reduction reads from memory a second."""
        return self._other.nbytes / self(self._other.sum) / 1e3


def captured(run: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """A replay of `run` as a CUDA graph, and True; or `run` itself, where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except Exception:
        torch.cuda.synchronize()
        return run, False
    return graph.replay, True


def header() -> dict[str, str]:
    """The GPU, its driver, clocks and limits now, and the software."""
    fields = (
        "name",
        "driver_version",
        "clocks.sm",
        "clocks.mem",
        "clocks.max.sm",
        "power.draw",
        "power.limit",
        "temperature.gpu",
    )
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    values = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) | {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
