"""Numbers that the host has are never read from the device.

The device of these tests is torch's "meta": its tensors have no content, so that every attempt to
read one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sensorium.models.seams.host_copies import HostCopies, following, keep_host_copies

DEVICE = torch.device("meta")
GRIDS = torch.tensor([[1, 4, 6], [2, 2, 8]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])


def make_known(copies: HostCopies, on_host: torch.Tensor) -> torch.Tensor:
    on_device = torch.empty_like(on_host, device=DEVICE)
    copies.add(on_device, on_host.clone())
    return on_device


COMPUTATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sizes of a split": lambda grids, _: (grids.prod(-1) // 4).tolist(),
    "one number": lambda grids, _: [int(grids[1, 0]), grids.max().item(), bool((grids > 0).all())],
    "a loop": lambda grids, _: [height.item() * width.item() for _, height, width in grids],
    "indices": lambda _, mask: mask.bool().flatten().nonzero().squeeze(-1),
    "repeated": lambda grids, _: torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0]),
    "selected": lambda grids, mask: grids[mask[:, 1].bool()],
    "joined": lambda grids, mask: torch.cat([grids.flatten(), mask.sum(-1)]).cumsum(0),
    "several results": lambda grids, _: grids.max(dim=0),
    "another type": lambda grids, _: grids.to(torch.float32) / 3,
    "on the host": lambda grids, _: grids.cpu() + 1,
    "made from numbers": lambda grids, _: torch.tensor(grids.tolist(), device=grids.device),
    "sent": lambda grids, _: torch.tensor([1, 2, 3]).to(grids.device) * grids,
    "counted": lambda grids, mask: (
        (torch.arange(4, device=grids.device) < mask.sum(-1)[:, None]).all(-1).tolist()
    ),
    "a row of a column": lambda grids, _: grids[:, 1:2][1:],
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_functions_of_known_numbers_are_computed_on_the_host(name: str) -> None:
    compute = COMPUTATIONS[name]
    expected = compute(GRIDS.clone(), MASK.clone())
    copies = HostCopies([])
    grids, mask = make_known(copies, GRIDS), make_known(copies, MASK)
    with following(copies):
        found = compute(grids, mask)
    if isinstance(found, torch.Tensor) and name != "on the host":
        assert found.device == DEVICE
        found = copies.find(found)
    if name == "several results":
        found = [copies.find(part) for part in found]
    if isinstance(expected, list):
        assert found == expected
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected)
    else:
        assert all(map(torch.equal, found, expected))


def test_attributes_are_those_of_the_tensor_on_the_device() -> None:
    copies = HostCopies([])
    grids = make_known(copies, GRIDS)
    with following(copies):
        assert grids.device == DEVICE
        assert grids.shape == GRIDS.shape
        assert torch.zeros(3, device=grids.device).device == DEVICE


def test_other_numbers_of_the_device_stay_unknown() -> None:
    copies = HostCopies([])
    grids, pixels = make_known(copies, GRIDS), torch.empty(2, 3, device=DEVICE)
    with following(copies):
        mixed = pixels * grids
        assert copies.find(mixed) is None
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            mixed.sum().item()


@pytest.mark.parametrize(
    "change",
    [
        lambda grids: grids.__setitem__(0, 7),
        lambda grids: grids.__iadd__(1),
        lambda grids: grids.add_(1),
        lambda grids: grids.add_(torch.empty(3, device=DEVICE)),
        lambda grids: torch.add(grids, 1, out=grids),
        lambda grids: torch.zeros_like(grids).fill_(1),
    ],
)
def test_a_change_in_place_of_known_numbers_is_refused(
    change: Callable[[torch.Tensor], Any],
) -> None:
    copies = HostCopies([])
    grids = make_known(copies, GRIDS)
    with following(copies), pytest.raises(RuntimeError, match="changes numbers in place"):
        change(grids)


def test_copies_on_the_host_are_the_callers_own() -> None:
    copies = HostCopies([])
    grids = make_known(copies, GRIDS)
    total, parts = torch.zeros(1, dtype=torch.long), []
    with following(copies):
        grids.cpu().add_(1)
        for number in (3, 4):
            parts.append(total.to(DEVICE))
            total += number
        found = torch.cat(parts)
        assert grids.tolist() == GRIDS.tolist()
        assert found.tolist() == [0, 3]


def test_calls_with_keywords_and_lists_as_indices_are_as_in_torch() -> None:
    copies = HostCopies([])
    grids, pixels = make_known(copies, GRIDS), torch.arange(6).view(2, 3)
    with following(copies):
        assert torch.cat(tensors=[grids, grids]).tolist() == GRIDS.tolist() * 2
        assert torch.sum(input=grids).item() == GRIDS.sum()
        assert pixels[[0, 1]].tolist() == pixels.tolist()


def test_tensors_made_on_the_device_stay_there() -> None:
    copies = HostCopies([])
    grids = make_known(copies, GRIDS)
    with following(copies):
        made = torch.zeros_like(grids, device=grids.device)
    assert made.device == DEVICE


def test_the_size_of_a_known_mask_is_counted_on_the_host() -> None:
    copies = HostCopies([])
    mask, audio = make_known(copies, MASK), torch.empty(2, 4, 5, device=DEVICE)
    with following(copies):
        assert audio[mask.bool()].shape == (4, 5)
        assert audio[0, mask[1].bool()].shape == (1, 5)
        assert audio[:, mask[0].bool(), 1].shape == (2, 3)
        assert audio[0].shape == (4, 5)


def test_equal_tensors_are_sent_once_and_later_none() -> None:
    with keep_host_copies([]) as copies:
        sent = copies.send(torch.tensor([1, 2]), DEVICE)
        assert copies.send(torch.tensor([1, 2]), DEVICE) is sent
        assert copies.send(torch.tensor([1, 2], dtype=torch.int32), DEVICE) is not sent
        copies.complete()
        assert copies.send(torch.tensor([1, 2]), DEVICE) is sent
        with pytest.raises(RuntimeError, match="numbers from the host that it did not get before"):
            copies.send(torch.tensor([3]), DEVICE)
