"""Histograms of many clients are summed a few clients at a time, to the same whole numbers."""

import pytest
import torch

from silograph.evaluation.evaluate import sum_histograms


@pytest.mark.parametrize("clients", [1, 15, 16, 17, 100])
def test_sums_are_those_of_all_clients_at_once(clients: int) -> None:
    top = torch.iinfo(torch.int32).max  # sums of these need more bits
    generator = torch.Generator().manual_seed(clients)
    bins = torch.randint(top - 9, top, (clients, 3, 2, 5), generator=generator).int()
    counts = sum_histograms({"test.histogram": bins})
    assert counts["test.histogram"].dtype == torch.int64
    assert torch.equal(counts["test.histogram"], bins.long().sum(0))
    assert counts["test.has_histogram"].tolist() == [True] * clients


def test_narrow_sums_tell_who_sent_none() -> None:
    generator = torch.Generator().manual_seed(0)
    bins = torch.randint(0, 9, (100, 3, 2, 5), generator=generator).int()
    bins[::7] = 0
    counts = sum_histograms({"val.histogram": bins})
    assert counts["val.histogram"].dtype == torch.int64
    assert torch.equal(counts["val.histogram"], bins.long().sum(0))
    assert counts["val.has_histogram"].tolist() == [i % 7 != 0 for i in range(100)]
