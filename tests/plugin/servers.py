"""A real `vllm serve`, started and stopped."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

VLLM = Path(sys.executable).with_name("vllm")
NAME = "checkpoints/tiny"
READY_SECONDS = 180
PROMPT = "The capital of France is"
HELLO = [{"role": "user", "content": "Hello"}]


def environment() -> dict[str, str]:
    # More threads than free cores make torch's barriers wait for the scheduler.
    own = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    # The engines of other tests live in their own process; a server's does not.
    inherited = dict(os.environ)
    inherited.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return inherited | own


@dataclass
class Server:
    process: subprocess.Popen
    port: int
    tokenizer: Tokenizer
    log: Path

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120
        )

    def complete(self, prompt=PROMPT, max_tokens=8, **body):
        """A completion, greedy unless asked otherwise; its choices carry token_ids."""
        # vLLM leaves the echo out where ids are asked for.
        ids = not body.get("echo", False)
        body = {"temperature": 0, "return_token_ids": ids} | body
        return self.client.completions.create(
            model=NAME, prompt=prompt, max_tokens=max_tokens, extra_body=body
        )

    def tokens(self, **body) -> list[int]:
        return self.complete(**body).choices[0].token_ids

    def chat(self, max_tokens=12, **body):
        return self.client.chat.completions.create(
            model=NAME,
            messages=HELLO,
            max_tokens=max_tokens,
            temperature=0,
            **body,
        )

    def id_of(self, token: str) -> int:
        return self.tokenizer.token_to_id(token)

    def no_whitespace(self) -> dict[str, float]:
        """A logit_bias. Grammars of JSON let random weights write spaces until the limit."""
        ids = range(self.tokenizer.get_vocab_size())
        texts = self.tokenizer.decode_batch([[i] for i in ids])
        return {str(i): -100.0 for i in ids if texts[i].isspace()}

    def series(self, name: str, label: str = "position") -> dict[str, float]:
        """A metric by one of its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels.get(label, "")] += sample.value
        return dict(found)

    def metric(self, name: str) -> float:
        return sum(self.series(name).values())


@contextmanager
def serving(
    checkpoint: Path, log: Path, options: str, *, outlives: bool = True
) -> Iterator[Server]:
    """A server of `checkpoint`, ready; what it says goes to `log`. It must be there at the end, unless a test ends it itself."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = (
        f"{VLLM} serve {checkpoint} --port {port} --served-model-name {NAME} {options}"
    )
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(command),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not healthy(port):
            assert process.poll() is None, tail(log, "the server ended")
            waited = time.monotonic() - start
            assert waited < READY_SECONDS, tail(log, "the server is not ready")
            time.sleep(0.2)
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        yield Server(process, port, tokenizer, log)
        if not outlives:
            return
        assert process.poll() is None, tail(log, "the server did not survive")
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            pytest.fail(tail(log, "the server did not stop"))
    finally:
        # A stop during the start can hang vLLM, so its processes are not asked twice.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


def tail(log: Path, what: str) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"{what}; the end of its log:", *lines[-60:]])
