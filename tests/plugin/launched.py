"""Engines of two ranks, each in a process of its own, as a launcher such as torchrun starts them; both run the same job."""

import contextlib
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

SECONDS = 400


# Imported by a server that runs nothing itself, and is forked: a quick start, and no thread is lost.
PRELOADED = ["engines", "vllm.entrypoints.llm", "numba"]
# Engines that a job may build, one after another.
MOST_ENGINES = 8


def _free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(MOST_ENGINES)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _run(
    to, rank: int, ports: list[int], job: Callable[..., Any], arguments: tuple
) -> None:
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    # A place to meet for each engine: vLLM names shared memory by it, and for a launcher it is always the same.
    port = iter(ports)
    ExecutorWithExternalLauncher._distributed_args = lambda self: (
        f"tcp://127.0.0.1:{next(port)}",
        rank,
        rank,
    )
    # Tensors too by value: this process ends before they are looked at.
    to.send_bytes(pickle.dumps(job(rank, *arguments)))


def prepare() -> None:
    """Begin to import what ranks need, beside what this process goes on with."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def two_ranks(job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `job(rank, *arguments)`, a function of a module, returns on each rank."""
    prepare()
    context = multiprocessing.get_context("forkserver")
    ports, pipes, processes = _free_ports(), [], []
    for rank in range(2):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(theirs, rank, ports, job, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(SECONDS):
                raise TimeoutError(f"rank {rank} has not answered in {SECONDS} s")
            results.append(pickle.loads(pipe.recv_bytes()))
        return results
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        # vLLM leaves its shared memory behind.
        for port in ports:
            for left in Path("/dev/shm").glob(f"{port}-*-cpushm_*"):
                left.unlink()
