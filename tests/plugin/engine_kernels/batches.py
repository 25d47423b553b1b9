"""Random batches, as the runner builds them, for the tests of several kernels."""

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st

# An interpreted launch takes milliseconds, so a few examples must do.
few_examples = settings(max_examples=12, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Request:
    """What one request brings to a batch.

    Attributes:
        computed: tokens already computed.
        query: tokens in this batch; 0 for a row of padding.
        beyond: prompt length minus computed; positive while the prompt is computed.
        logits: of the query's last tokens, how many get logits.
        sampled: how many tokens were sampled, at most `logits`.
    """

    computed: int
    query: int
    beyond: int
    logits: int
    sampled: int

    @property
    def prefill(self) -> int:
        return max(0, self.computed + self.beyond)


@st.composite
def requests(draw: st.DrawFn, max_logits: int = 3) -> Request:
    query = draw(st.integers(0, 9))
    logits = draw(
        st.integers(min(1, query), max(min(1, query), min(max_logits, query)))
    )
    return Request(
        computed=draw(st.integers(0, 20)),
        query=query,
        beyond=draw(st.integers(-12, 12)),
        logits=logits,
        sampled=draw(st.integers(0, logits)),
    )


@dataclass(frozen=True)
class Batch:
    """B requests in some order of the state's slots, with `unused` more slots."""

    requests: list[Request]
    slots: list[int]
    num_slots: int

    @property
    def size(self) -> int:
        return len(self.requests)

    def idx_mapping(self, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(self.slots, dtype=dtype)

    def per_request(self, name: str) -> torch.Tensor:
        """[B] int32."""
        values = [getattr(request, name) for request in self.requests]
        return torch.tensor(values, dtype=torch.int32)

    def per_slot(self, name: str) -> torch.Tensor:
        """[num_slots] int32; 3 in unused slots."""
        values = torch.full((self.num_slots,), 3, dtype=torch.int32)
        values[self.idx_mapping().long()] = self.per_request(name)
        return values

    def starts(self, name: str) -> torch.Tensor:
        """[B + 1] int32, running sums of query or logits."""
        sums = self.per_request(name).cumsum(0).int()
        return torch.cat([torch.zeros(1, dtype=torch.int32), sums])

    def seq_lens(self) -> torch.Tensor:
        """[B] int32."""
        return self.per_request("computed") + self.per_request("query")

    def total(self, name: str) -> int:
        return sum(getattr(request, name) for request in self.requests)


@st.composite
def batches(draw: st.DrawFn, min_size: int = 0, max_logits: int = 3) -> Batch:
    members = draw(
        st.lists(requests(max_logits), min_size=min_size, max_size=5), label="requests"
    )
    num_slots = len(members) + draw(st.integers(1, 3))
    slots = draw(st.permutations(range(num_slots)))[: len(members)]
    return Batch(members, list(slots), num_slots)


def tokens(
    *shape: int, dtype: torch.dtype = torch.int32, seed: int = 0
) -> torch.Tensor:
    """Token ids in [0, 97)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, shape, generator=generator, dtype=dtype)
