"""How a server ends: told to, it finishes what it has begun; when its engine is killed, it says so and does not hang."""

import signal
import threading

import httpx
import openai
import psutil
import pytest
from servers import NAME, PROMPT, serving, tail

OPTIONS = (
    "--max-model-len 8192 --max-num-seqs 4 --kv-cache-memory-bytes 256M --dtype float32"
)
TOKENS = 800
CLIENTS = 3


class Stream(threading.Thread):
    """A streamed answer, read to its end on a thread of its own."""

    def __init__(self, server, prompt: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.asked = tokens
        self.begun, self.tokens, self.error = threading.Event(), [], None
        self.finish, self.server, self.prompt = None, server, prompt
        self.start()

    def run(self) -> None:
        try:
            with self.server.client.completions.create(
                model=NAME,
                prompt=self.prompt,
                max_tokens=self.asked,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            ) as events:
                for event in events:
                    (choice,) = event.choices
                    self.tokens += choice.token_ids or []
                    self.finish = choice.finish_reason or self.finish
                    self.begun.set()
        except (openai.APIError, httpx.HTTPError) as error:
            self.error = error
        finally:
            self.begun.set()


def streams(server, tokens: int) -> list[Stream]:
    """Some that have all begun; not all of them have ended."""
    found = [Stream(server, f"{PROMPT} {i}", tokens) for i in range(CLIENTS)]
    for stream in found:
        assert stream.begun.wait(60)
    assert any(len(stream.tokens) < tokens for stream in found)
    return found


@pytest.fixture
def server(small_checkpoint, tmp_path, request):
    log, options = tmp_path / "log", f"{OPTIONS} {request.param}"
    with serving(small_checkpoint, log, options, outlives=False) as server:
        yield server


@pytest.mark.parametrize("server", ["--shutdown-timeout 60"], indirect=True)
def test_a_server_that_is_told_to_end_finishes_what_it_has_begun(server):
    alone = server.tokens(prompt=f"{PROMPT} 1", max_tokens=TOKENS, ignore_eos=True)
    begun = streams(server, TOKENS)
    server.process.send_signal(signal.SIGTERM)
    for stream in begun:
        stream.join(60)
        assert stream.error is None, tail(server.log, str(stream.error))
        assert (len(stream.tokens), stream.finish) == (TOKENS, "length")
    assert begun[1].tokens == alone
    assert server.process.wait(60) == 0, tail(server.log, "another status")
    with pytest.raises(openai.APIConnectionError):
        server.complete()


@pytest.mark.parametrize("server", [""], indirect=True)
def test_a_server_whose_engine_is_killed_says_so_and_ends(server):
    begun = streams(server, 8000)
    (engine,) = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "EngineCore" in child.name() or "EngineCore" in "".join(child.cmdline())
    ]
    engine.kill()
    for stream in begun:
        stream.join(30)
        assert not stream.is_alive(), "a client waits for a server without an engine"
        assert stream.finish is None
        assert "EngineCore encountered an issue" in str(stream.error)
    assert server.process.wait(30) is not None
    assert "EngineDeadError" in server.log.read_text(), tail(server.log, "unsaid")
    with pytest.raises(openai.APIConnectionError):
        server.complete()
